"""Learning a job from its traffic, its logs and its bootstrap; docs/use/learn.md says what proves what."""
