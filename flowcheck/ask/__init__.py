"""Asking nodes for versions: a client of their HTTP API, which version is taken and from where. Torch and the
standard library."""
