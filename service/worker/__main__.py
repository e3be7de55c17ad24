"""`python -m service.worker OPTIONS`: Celery's `worker` command on this app.

`celery -A service.worker worker` does the same, but looks for the package in the working folder first, which
may have a `service` of its own.
"""

from __future__ import annotations

import sys

from service.worker.celery import worker

if __name__ == "__main__":
    worker.worker_main(["--quiet", "worker", *sys.argv[1:]])
