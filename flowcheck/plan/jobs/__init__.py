"""Jobs by name, and whether a node can follow such a job."""
