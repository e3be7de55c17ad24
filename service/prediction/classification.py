"""The answer of `/classify`: class probabilities and their entropy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from service.about import NOTICE
from service.inference.classification import Classification, classify
from service.inference.pipeline import PreparedScan
from service.inference.uncertainty import entropy
from service.observation import SeenLabel
from service.prediction.answer import EncodedAnswer, LoadedGraph, Predictor
from service.prediction.options import ClassifyOptions
from service.prediction.output import POOL_SELECTION_TEXT, PickReport, pool_selections
from service.prediction.receipt import Receipt


class ClassReport(BaseModel):
    """The network's answer for one slice or a whole scan."""

    predicted: str = Field(description="The most probable class; of equals the first one of the task.")
    probabilities: dict[str, float] = Field(
        description="Probability by class, in the task's order; the sum is 1. Calibration is the network's."
    )
    entropy: float = Field(
        description="Normalised entropy of the probabilities: 0 certain, 1 all classes alike. Not a "
        "probability of error."
    )


class ClassificationReport(ClassReport):
    """The answer of `/classify`. A volume's probabilities are the mean over its slices."""

    slices: list[ClassReport] | None = Field(
        description="Each slice of a volume, along the task's plane in order; null for an image."
    )
    picked: list[PickReport] | None = Field(None, description=POOL_SELECTION_TEXT)
    warnings: list[str] = Field(
        description="Differences of the scan from the task's training scans, and other warnings."
    )
    shape: list[int] = Field(description="Shape of the scan: [H, W], or the volume's own [I, J, K].")
    timing_ms: dict[str, float]
    receipt: Receipt
    notice: str = NOTICE


class ClassificationPredictor(Predictor[ClassifyOptions]):
    """One scan to be classified."""

    KIND = "classification"

    def make(self, reading: PreparedScan, graph: LoadedGraph) -> EncodedAnswer:
        """Classify the scan. Raises as the base class."""
        found = classify(
            reading,
            self.selection.manifest,
            graph.session,
            self.watch,
            self.options.routing or "scan",
            between=self.between,
        )
        with self.watch.stage("encode"):
            body = self._report(found, reading, graph).model_dump_json().encode()
        headers = self._headers(graph, reading, "classification.json")
        names, mean = self.selection.manifest.task.class_names, found.mean
        likely = int(mean.argmax())
        predicted = SeenLabel(names[likely], float(mean[likely]), math.prod(found.scan.grid))
        observed = self._observed(graph, reading, (predicted,), found.shift)
        return EncodedAnswer(
            body, "application/json", headers, observed, found.picked, unlike=reading.warnings
        )

    def _report(
        self, found: Classification, reading: PreparedScan, graph: LoadedGraph
    ) -> ClassificationReport:
        names = self.selection.manifest.task.class_names
        slices = [class_report(row, names) for row in found.probabilities]
        return ClassificationReport(
            **class_report(found.mean, names).model_dump(),
            slices=slices if found.scan.is_volume else None,
            picked=pool_selections(found.picked),
            warnings=self._warning_texts(reading),
            shape=list(found.scan.grid),
            timing_ms=self._timing(),
            receipt=self._receipt(graph, reading, found.shift),
        )


def class_report(probabilities_K: NDArray[np.float64], names: Sequence[str]) -> ClassReport:
    """One distribution over the classes `names`, in words."""
    return ClassReport(
        predicted=names[int(probabilities_K.argmax())],
        probabilities=dict(zip(names, probabilities_K.tolist(), strict=True)),
        entropy=entropy(probabilities_K),
    )
