"""What the process holds on the host and how it is set: memory, threads, children, descriptors, settings."""
