"""Oracles: what must hold between two ways of reaching the same state."""
