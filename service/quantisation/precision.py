"""The precisions of graphs, and where each may answer."""

from __future__ import annotations

from typing import TypeGuard

from model_store.manifest import Reduced
from service.errors import PrecisionUnavailable
from service.inference.providers import CUDA, TENSORRT

PRECISIONS: tuple[Reduced, ...] = ("int8", "float16")


def is_reduced(precision: str) -> TypeGuard[Reduced]:
    """Whether it is another precision than float32."""
    return precision in PRECISIONS


def check_provider(precision: Reduced, provider: str) -> None:
    """Raise PrecisionUnavailable for a precision that the provider does not compute faster than float32.

    On a CPU, halves are computed as float32; a GPU has no integer kernels for these graphs in onnxruntime.
    """
    wants_gpu = precision == "float16"
    if wants_gpu != (provider in (CUDA, TENSORRT)):
        raise PrecisionUnavailable(
            f"Graphs in {precision} are for {'a GPU' if wants_gpu else 'the CPU'}, found {provider} here "
            f"(LOCUM_DEVICE): keep float32, or take {'int8' if wants_gpu else 'float16'}."
        )
