"""The tables of the history, as the newest migration leaves them."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

METADATA = MetaData(
    # Without names a later migration could not change a constraint.
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_name)s",
    }
)

RUNS = Table(
    "runs",
    METADATA,
    Column("id", Integer, primary_key=True),
    # The hash of the report, so that a job that is repeated adds nothing.
    Column("key", String(64), nullable=False, unique=True),
    # In UTC; SQLite keeps no zone.
    Column("created", DateTime, nullable=False),
    Column("commit", String(64), nullable=False),
    Column("hardware", Text, nullable=False),
    Column("driver", Text, nullable=False),
    Column("platform", Text, nullable=False),
    Column("python", Text, nullable=False),
    Column("torch", Text, nullable=False),
    Column("lowtide", Text, nullable=False),
    Column("command", Text, nullable=False),
    Index("ix_runs_created", "created"),
)
"""One row per report."""

SUBJECTS = Table(
    "subjects",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
)

VERDICTS = Table(
    "verdicts",
    METADATA,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("subject_id", ForeignKey("subjects.id"), primary_key=True),
    Column("outcome", String(16), nullable=False),
)
"""How a run judged a subject: where it did, a finding that it does not have is none."""

SERIES = Table(
    "series",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("subject_id", ForeignKey("subjects.id"), nullable=False),
    # `finding` or `reading`.
    Column("kind", String(16), nullable=False),
    Column("resource", String(32), nullable=False),
    Column("cause", String(32), nullable=False),
    Column("device", String(64), nullable=False),
    Column("stage", Text, nullable=False),
    Column("fingerprint", String(64), nullable=False),
    UniqueConstraint("subject_id", "kind", "resource", "cause", "device", "stage", "fingerprint"),
)
"""What is followed from run to run: one finding by its fingerprint, or one metric of a life."""

RESIDUES = Table(
    "residues",
    METADATA,
    Column("run_id", ForeignKey("runs.id"), primary_key=True),
    Column("series_id", ForeignKey("series.id"), primary_key=True),
    Column("bytes", BigInteger, nullable=False),
    Column("count", BigInteger, nullable=False),
    Index("ix_residues_series_id", "series_id"),
)
"""What was left of a series in a run."""
