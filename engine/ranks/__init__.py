"""The ranks of tensor parallelism: one process each, and the executor that makes them work as one worker."""
