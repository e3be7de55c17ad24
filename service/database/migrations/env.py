"""How alembic meets the database: on the connection that `service.database.schema` opened."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection

from service.database.models import Base


def run(connection: Connection) -> None:
    """All pending migrations in one transaction: a failure leaves the schema as it was."""
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        render_as_batch=connection.dialect.name == "sqlite",
        transaction_per_migration=False,
    )
    with context.begin_transaction():
        context.run_migrations()


run(context.config.attributes["connection"])
