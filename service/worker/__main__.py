"""`python -m service.worker OPTIONS`: Celery's `worker` command on this app.

`celery -A service.worker worker` does the same, but looks for the package in the working folder first, which
may have a `service` of its own.
"""

from __future__ import annotations

import sys


def main(options: list[str]) -> None:
    """Run the worker, or print Celery's help of it, which needs none of what a worker imports."""
    if "--help" in options:
        from celery import Celery

        worker = Celery()
    else:
        from service.worker.celery import worker
    worker.worker_main(["--quiet", "worker", *options])


if __name__ == "__main__":
    main(sys.argv[1:])
