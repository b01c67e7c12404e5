"""What every planning command says, and how it is printed and drawn."""
