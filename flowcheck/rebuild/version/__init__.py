"""The version that follows from an iteration: its follower, records, what is built, what is healed."""
