"""The fuzzer: scenarios, the search over them, and the command line."""
