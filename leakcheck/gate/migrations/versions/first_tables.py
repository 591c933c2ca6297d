"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create them."""
    op.create_table(
        "runs",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("created", sa.DateTime, nullable=False),
        sa.Column("commit", sa.String(64), nullable=False),
        *(
            sa.Column(name, sa.Text, nullable=False)
            for name in ("hardware", "driver", "platform", "python", "torch", "lowtide", "command")
        ),
        sa.UniqueConstraint("key", name="uq_runs_key"),
    )
    op.create_index("ix_runs_created", "runs", ["created"])
    op.create_table(
        "subjects",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.UniqueConstraint("name", name="uq_subjects_name"),
    )
    op.create_table(
        "verdicts",
        sa.Column("run_id", sa.Integer, sa.ForeignKey("runs.id"), primary_key=True),
        sa.Column("subject_id", sa.Integer, sa.ForeignKey("subjects.id"), primary_key=True),
        sa.Column("outcome", sa.String(16), nullable=False),
    )
    identity = [("kind", 16), ("resource", 32), ("cause", 32), ("device", 64), ("fingerprint", 64)]
    op.create_table(
        "series",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("subject_id", sa.Integer, sa.ForeignKey("subjects.id"), nullable=False),
        *(sa.Column(name, sa.String(length), nullable=False) for name, length in identity),
        sa.Column("stage", sa.Text, nullable=False),
        sa.UniqueConstraint(
            "subject_id",
            "kind",
            "resource",
            "cause",
            "device",
            "stage",
            "fingerprint",
            name="uq_series_subject_id",
        ),
    )
    op.create_table(
        "residues",
        sa.Column("run_id", sa.Integer, sa.ForeignKey("runs.id"), primary_key=True),
        sa.Column("series_id", sa.Integer, sa.ForeignKey("series.id"), primary_key=True),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("count", sa.BigInteger, nullable=False),
    )
    op.create_index("ix_residues_series_id", "residues", ["series_id"])


def downgrade() -> None:
    """Drop them."""
    for table in ("residues", "series", "verdicts", "subjects", "runs"):
        op.drop_table(table)
