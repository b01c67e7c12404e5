"""Captures and ports that packets come from: what they drop, and when they are silent."""
