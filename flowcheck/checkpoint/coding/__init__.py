"""Versions that survive the loss of nodes: the erasure code over their bytes (code.py)."""
