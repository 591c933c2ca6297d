"""What `lowtide ps` writes: typed, immutable data with a JSON Schema, and the same as text."""
