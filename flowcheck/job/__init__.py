"""The manifest of a job: its model, its form as JSON, the checks. Standard library only."""
