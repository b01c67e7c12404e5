"""A rehearsal: a loss of nodes gone through before there is one."""
