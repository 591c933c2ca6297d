"""The engine's core in a process of its own, and the client through which the engine's user has it."""
