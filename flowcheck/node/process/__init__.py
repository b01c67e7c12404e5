"""A process of a node's own: how it is started and watched, and what the lines are that it is spoken to in."""
