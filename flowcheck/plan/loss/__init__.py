"""`flowcheck plan loss`."""
