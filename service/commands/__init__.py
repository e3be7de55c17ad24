"""Commands of `python -m service` that work on the database, whether the service runs or not."""
