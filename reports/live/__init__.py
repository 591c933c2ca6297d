"""A life that is still running, shown in a browser: what the run writes, and the server that shows it."""
