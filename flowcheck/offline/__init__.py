"""Captures in, checkpoints and a report out."""
