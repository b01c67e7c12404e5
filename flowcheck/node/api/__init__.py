"""The HTTP API: a process of its own that answers it, its supervisor in the node, and its routes."""
