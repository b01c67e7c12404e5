"""What a node says of itself: its event log, counters, problems, metrics and the board that processes share."""
