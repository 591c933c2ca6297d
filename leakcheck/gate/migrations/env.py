"""Runs the migrations in the connection that `history` hands over; Alembic loads this file by its path."""

from __future__ import annotations

from alembic import context

from lowtide.leakcheck.gate.history import METADATA


def _run() -> None:
    context.configure(connection=context.config.attributes["connection"], target_metadata=METADATA)
    with context.begin_transaction():
        context.run_migrations()


# Alembic loads it under this name; by any other it is only looked at.
if __name__ == "env_py":
    _run()
