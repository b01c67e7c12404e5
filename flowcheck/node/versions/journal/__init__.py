"""The journal of a node: gradients of its own iterations, bases, and steps that are made of them again."""
