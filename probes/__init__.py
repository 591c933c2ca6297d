"""Probes: each reads one kind of state and changes nothing.  They import nothing of the project outside this folder."""
