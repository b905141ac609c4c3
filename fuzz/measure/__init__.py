"""The figures: speed against a native program, discovery of known faults, robustness."""
