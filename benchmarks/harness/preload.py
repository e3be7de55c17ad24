"""Imports for forked processes: what an API, its worker, a run, its operator and its hospitals import.

No module here reads the settings when it is imported. One that is not installed is left out.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

from training.methods.registry import methods

_SERVICE = (
    "alembic.command",
    "anyio._backends._asyncio",
    "celery.apps.worker",
    "celery.bin.celery",
    "celery.concurrency.prefork",
    "celery.worker.components",
    "celery.worker.consumer",
    "kombu.transport.redis",
    "service.server",
    "service.worker.routing_space",
    "service.worker.runner",
    "uvicorn.lifespan.on",
    "uvicorn.loops.uvloop",
)
_TRAINING = (
    "onnx",
    "torch.onnx",
    "training.command",
    "nvflare.fuel.f3.cellnet.core_cell",
    "nvflare.lighter.utils",
    "training.network.joining",
    "training.network.operator",
)

for _name in (*_SERVICE, *_TRAINING):
    with suppress(ModuleNotFoundError):
        import_module(_name)
# It imports all of them.
methods()
