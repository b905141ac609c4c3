"""Saved states for people: what a blob holds, what is odd about it, and how two of them differ."""
