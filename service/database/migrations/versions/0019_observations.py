"""What is known of every answer, and the secret by which series and scans are named in it."""

from __future__ import annotations

import secrets

import sqlalchemy as sa
from alembic import op

from service.database.migrations.append_only import forbid_changes

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables, and draw the secret."""
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "observation",
        sa.Column("id", number, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("hospital", sa.String(64)),
        sa.Column("model", sa.String(200), nullable=False),
        sa.Column("version", sa.String(71), nullable=False),
        sa.Column("graph", sa.String(71), nullable=False),
        sa.Column("request", sa.String(36), nullable=False),
        sa.Column("way", sa.String(16), nullable=False),
        sa.Column("actor", sa.String(300), nullable=False),
        sa.Column("series", sa.String(64)),
        sa.Column("scan", sa.String(64), nullable=False),
        sa.Column("scanner", sa.String(200)),
        sa.Column("acquisition", sa.JSON()),
        sa.Column("shift", sa.Double()),
        sa.Column("shift_at", sa.String(16)),
        sa.Column("size", sa.JSON(), nullable=False),
        sa.Column("spacing", sa.JSON()),
        sa.Column("unlike", sa.Integer(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("warnings", sa.JSON(), nullable=False),
        sa.Column("precision", sa.String(16), nullable=False),
        sa.Column("provider", sa.String(64), nullable=False),
        sa.Column("locum", sa.String(32), nullable=False),
        sa.Column("usual", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_observation"),
        sa.ForeignKeyConstraint(["hospital"], ["hospital.id"], name="fk_observation_hospital_hospital"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_observation_at", "observation", ["at"])
    op.create_index("ix_observation_request", "observation", ["request"])
    op.create_index("ix_observation_hospital_model_id", "observation", ["hospital", "model", "id"])
    op.create_index("ix_observation_hospital_version_id", "observation", ["hospital", "version", "id"])
    op.create_index("ix_observation_hospital_scan", "observation", ["hospital", "scan"])
    op.create_table(
        "observed_label",
        sa.Column("observation", number, autoincrement=False, nullable=False),
        sa.Column("label", sa.String(200), nullable=False),
        sa.Column("confidence", sa.Double(), nullable=False),
        sa.Column("voxels", sa.BigInteger(), nullable=False),
        sa.Column("volume_ml", sa.Double()),
        sa.Column("parts", sa.Integer()),
        sa.Column("at_border", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("observation", "label", name="pk_observed_label"),
        sa.ForeignKeyConstraint(
            ["observation"],
            ["observation.id"],
            name="fk_observed_label_observation_observation",
            ondelete="CASCADE",
        ),
    )
    for table in ("observation", "observed_label"):
        forbid_changes(table)
    secret = op.create_table(
        "secret",
        sa.Column("name", sa.String(32), nullable=False),
        sa.Column("value", sa.LargeBinary(32), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_secret"),
    )
    op.bulk_insert(secret, [{"name": "observation", "value": secrets.token_bytes(32)}])


def downgrade() -> None:
    """Remove them, with what is in them."""
    for table in ("secret", "observed_label", "observation"):
        op.drop_table(table)
    if op.get_bind().dialect.name == "postgresql":
        for table in ("observed_label", "observation"):
            op.execute(f"DROP FUNCTION {table}_is_never_changed()")
