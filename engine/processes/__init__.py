"""The engine's other processes: how they are started, what is said to them, and how each notices another's end."""
