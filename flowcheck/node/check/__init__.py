"""What a node would take, said before it is started."""
