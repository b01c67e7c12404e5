"""Versions as files."""
