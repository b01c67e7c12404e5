"""What of a model and an optimizer a node can follow, and the manifest that says it."""
