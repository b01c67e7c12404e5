"""`flowcheck plan holders`: which machine keeps what, and which losses everything survives."""
