"""An iteration: who may read on, when it closes, what is known of it, and whether a version may follow from it."""
