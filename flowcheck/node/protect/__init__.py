"""Copies and parity of other nodes' versions: a process of its own, its journal, and who holds what."""
