"""`flowcheck switch`: plan, diff, apply, show, verify and remove port mirroring (switch_configs does the work)."""
