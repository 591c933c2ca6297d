"""Alembic's environment: one module in `versions/` per change of the tables."""
