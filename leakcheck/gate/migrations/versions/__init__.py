"""The changes of the tables, which Alembic orders by their revisions."""
