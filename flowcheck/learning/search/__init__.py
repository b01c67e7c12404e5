"""The search: every hypothesis held against every observed message (see candidates.py)."""
