"""One connection to a checkpoint node: how it begins, what is sent on it, and what the node says."""
