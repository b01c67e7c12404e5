"""`flowcheck plan goodput`: checkpointing systems under failures, by formula and by simulation."""
