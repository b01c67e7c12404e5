"""Versions in a store of objects: a process of its own that writes them, its supervisor, and what is read back."""
