"""Imports for forked processes: what an API, its worker, a run, its operator and its hospitals import.

No module here reads the settings when it is imported. One that is not installed is left out.
"""

from __future__ import annotations

import gc
from contextlib import suppress
from importlib import import_module

from training.processes import PRELOADED

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

# Nothing that is imported is garbage. Frozen, it is not looked through in the forked processes, either, which
# would copy the pages of all objects.
gc.disable()
for _name in (*PRELOADED, *_SERVICE, *_TRAINING):
    with suppress(ModuleNotFoundError):
        import_module(_name)
# It imports all of them.
import_module("training.methods.registry").methods()
gc.freeze()
gc.enable()
