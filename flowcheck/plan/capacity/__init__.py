"""`flowcheck plan capacity`: a job, a node, its stages and its ports."""
