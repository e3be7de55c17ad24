"""The migrations, applied by `service.database.schema`."""
