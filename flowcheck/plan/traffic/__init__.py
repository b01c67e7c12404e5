"""What a job puts on the wire, and what a mirror loses of it."""
