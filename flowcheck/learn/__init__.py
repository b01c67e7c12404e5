"""Learning a job from its traffic, its logs and its bootstrap; docs/learn.md says what proves what."""
