"""The coverage-guided engine: runs libFuzzer targets in slices and makes findings of what they meet."""
