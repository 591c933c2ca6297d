"""The commands about processes: who holds what on this host, and a program with all that it starts."""
