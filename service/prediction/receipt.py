"""The receipt of an answer: request, model, graph, options and provider, so that it can be repeated.

The same input, graph, options, provider and onnxruntime version give the same mask, byte for byte; on a GPU,
on the same kind of card with the same driver and libraries.
"""

from __future__ import annotations

import platform

import onnxruntime
from pydantic import BaseModel, Field, JsonValue

from model_store.manifest import Precision
from service.about import NOTICE, locum_version
from service.inference.shift import ShiftAt


class ModelReceipt(BaseModel):
    """An artefact that took part in an answer."""

    name: str = Field(description="`name@version`")
    digest: str = Field(description="sha256 of the manifest")


class Receipt(BaseModel):
    """Everything that an answer depends on."""

    request: str = Field(description="Id of the request; also in `Locum-Request`.")
    input_sha256: str = Field(description="sha256 of the scan's file as received.")
    input_bytes: int
    model: ModelReceipt = Field(description="The requested artefact.")
    network: ModelReceipt = Field(description="The network inside it that answered.")
    graph: str = Field(description="sha256 of the onnx graph; also in `Locum-Graph`.")
    precision: Precision = Field(
        "float32", description="Precision of the graph: `float32`, or another that was assigned."
    )
    lens: str | None = Field(
        None,
        description="sha256 of the lens through which the network saw the scan; null: it saw it as it is.",
    )
    shift: float | None = Field(
        None,
        description="How far the scan is from the members' scans: its squared shift over what is natural "
        "between hospitals, so 1 is as usual. Null: the version does not say what is natural.",
    )
    shift_at: ShiftAt | None = Field(
        None,
        description="Where it was measured: at the first third of the network's batch `norms`, or by the "
        "scan's field, spectrum and quantiles against the members' `fingerprint`.",
    )
    personalization: str
    site: str | None
    cluster: str | None
    keep_largest: list[str] = Field(
        [], description="Labels of which the largest component alone was kept, as the model's task says."
    )
    why: str = Field(description="How version and network were chosen.")
    options: dict[str, JsonValue] = Field(description="The request's parameters, defaults filled in.")
    provider: str = Field(description="onnxruntime's execution provider.")
    gpu: str | None = Field(
        None, description="Card, driver, CUDA and cuDNN; null on the CPU. Others may round differently."
    )
    onnxruntime: str
    locum: str
    machine: str = Field(description="Processor architecture; another one may round differently.")
    notice: str = NOTICE


def software() -> dict[str, str]:
    """The part of a receipt that is the same for every request."""
    return {
        "onnxruntime": onnxruntime.__version__,
        "locum": locum_version(),
        "machine": platform.machine(),
    }
