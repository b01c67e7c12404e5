"""Other nodes that follow the same job: bytes and versions of theirs, and the step that all have."""
