"""Reproducers: what a finding becomes so that somebody without redraft can see it too.

`plain` lowers a traced scenario to a flat list of library calls, `python` and `cpp` print that list as programs,
`words` and `readme` as text.
"""
