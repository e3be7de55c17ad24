"""The device of a profile: `gpu` profiles have a field `device`, which their cells carry.

cells = on_device(cells, profile.device)      cells of the CPU stay as they were recorded
device = device_of(cell)
with as_in_workers(device): ...
alternated({name: awaited(step, device) for name, step in steps.items()}, ...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from benchmarks.harness.cells import Cell
from service.errors import ServiceError
from service.inference.sessions import probe_provider
from training.engine.client import RunEnvironment

CPU = "cpu"


def on_device(cells: Iterable[Cell], device: str) -> list[Cell]:
    """The cells with their device, if it is not the CPU."""
    return [cell if device == CPU else {**cell, "device": device} for cell in cells]


def device_of(cell: Cell) -> str:
    """The device of a cell: `cpu`, or `cuda`."""
    return str(cell.get("device", CPU))


def awaited(step: Callable[[], object], device: str) -> Callable[[], object]:
    """The step, which ends when the GPU has done it: kernels run on after the call that starts them."""
    if device == CPU:
        return step

    def done() -> None:
        step()
        torch.cuda.synchronize()

    return done


@contextmanager
def as_in_workers(device: str) -> Iterator[None]:
    """Run a block in torch's mode of workers and runs on a GPU: repeatable, and without TF32."""
    if device == CPU:
        yield
    else:
        with RunEnvironment(0, device, torch.get_num_threads()).applied():
            yield


def missing(device: str) -> str | None:
    """Why nothing can be computed on this device here; None where it can."""
    if device == CPU:
        return None
    if not torch.cuda.is_available():
        return (
            f"expected an NVIDIA GPU for device '{device}', found none that torch {torch.__version__} can "
            "use: run this profile on a machine with one and with torch's build for CUDA"
        )
    try:
        # Where it cannot, a session is the CPU's, and so would be the times.
        probe_provider(device)
    except ServiceError as error:
        return f"expected an NVIDIA GPU for device '{device}', found one for torch alone: {error}"
    return None
