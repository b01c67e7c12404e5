"""Gradients of the last iterations, as the optimizer read them, in a ring of files that outlives the process."""
