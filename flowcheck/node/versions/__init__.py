"""Versions that a node has of each run: which there are, where their files lie, and who may have them."""
