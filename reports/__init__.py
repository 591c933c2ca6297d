"""What is written and shown: the report's schema, and pure functions that render it."""
