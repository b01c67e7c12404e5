"""Groups of ranks that a node follows: who is connected, their session on the wire, what they are asked for."""
