"""`flowcheck plan report`: the answers as one page."""
