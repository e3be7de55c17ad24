"""The Celery worker, the only part of the service that imports torch."""
