"""How far a scan is from the members' scans, measured while the network answers.

R of the first third of the batch norms, as `personalization.test_time.ladder` defines it: the squared shift
of a layer's statistics over what is natural between hospitals. Late layers see the anatomy, and would cost
as much again.

A served graph has its batch norms folded into the convolutions before them. What such a convolution gives is
gamma (x - m) / sqrt(v + eps) + beta, so that mean and mean square of each of its channels tell those of x. A
graph gets them as one more output, `moments`, when it is loaded; its other nodes stay as they are.

Legend: S slices, L batch norms, C channels of all of them together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from model_store.artefact import Artefact
from model_store.errors import StoreError
from model_store.lens import FINGERPRINT, Fingerprint, fingerprint_of, mean_shift
from model_store.lens.fingerprint import seen_of
from model_store.lens.scan import images_of
from model_store.manifest import WEIGHTS, NetworkManifest
from model_store.preprocessing import Prepared, PreparedVolume
from personalization.options.presets import SPREAD

if TYPE_CHECKING:
    from onnx import ModelProto

Vector = NDArray[np.float64]

ShiftAt = Literal["norms", "fingerprint"]
"""Where a shift was measured: at the network's first batch norms, or by the scan's own statistics."""

MOMENTS: Final = "moments"
# Of batch norm in torch, unless a network says otherwise; one that does has no R.
_EPSILON = 1e-5
# Squared shift that is as good as none, as in the ladder.
_NO_SHIFT = 1e-6
# Below it a channel is switched off, and what it gives says nothing of what it gets.
_LEAST_GAMMA = 1e-4
# One slice in so many is compared with a fingerprint.
_ONE_IN = 16
_MEAN, _VARIANCE = ".running_mean", ".running_var"


@dataclass(frozen=True)
class Norm:
    """A batch norm: what it adds and multiplies by, and its statistics; float64 [C]."""

    beta: Vector
    gamma: Vector
    mean: Vector
    variance: Vector

    @property
    def scale(self) -> Vector:
        """What a channel is multiplied by."""
        return self.gamma / np.sqrt(self.variance + _EPSILON)


@dataclass(frozen=True)
class Norms:
    """The first third of a network's batch norms, and the squared shift of each that is as usual [L, 2].

    `biases` are those that a convolution before a batch norm may have, by their length; 0 for none.
    """

    norms: tuple[Norm, ...]
    usual: Vector
    biases: Mapping[int, tuple[Vector, ...]]

    @classmethod
    def of(cls, spread: bytes, weights: bytes) -> Norms | None:
        """Those of the weights (a safetensors file) for which members measured their spread; None of others.

        One patient's sampling variance is in what is usual, since a scan is one patient.
        """
        from safetensors.numpy import load

        state = {name: each for name, each in load(weights).items() if each.ndim == 1}
        said = json.loads(spread)
        paths = said["layers"][: math.ceil(len(said["layers"]) / 3)]
        if not paths or any(f"{path}{_MEAN}" not in state for path in paths):
            return None
        norms = tuple(_norm(state, path) for path in paths)
        members = said["members"]
        tau = (members + 1) / (members - 1) * np.exp(np.array(said["logarithm"], np.float64))
        usual = (tau + np.array(said["patient"], np.float64))[: len(paths)]
        biases: dict[int, list[Vector]] = {}
        for name, each in state.items():
            if name.endswith(".bias"):
                biases.setdefault(len(each), [np.zeros(len(each))]).append(each.astype(np.float64))
        return cls(norms, usual, {length: tuple(found) for length, found in biases.items()})

    def add_to(self, model: ModelProto) -> bool:
        """Add the output `moments` [S, 2 C] to a graph, where each of these batch norms is found in it.

        Returns whether it was added; if not, the graph is as it was.
        """
        from onnx import TensorProto, helper

        found = self._tensors(model)
        taken = {name for node in model.graph.node for name in node.output}
        if found is None or any(name.startswith(MOMENTS) for name in taken):
            return False
        nodes, parts = [], []
        for number, name in enumerate(found):
            square, *means = (f"{MOMENTS}.{number}.{each}" for each in ("square", "mean", "mean-square"))
            nodes.append(helper.make_node("Mul", [name, name], [square]))
            for of, mean in zip((name, square), means, strict=True):
                # On a CPU the only reduction that reads the blocks of channels in which a convolution writes.
                nodes.append(helper.make_node("GlobalAveragePool", [of], [f"{mean}.kept"]))
                nodes.append(helper.make_node("Flatten", [f"{mean}.kept"], [mean], axis=1))
                parts.append(mean)
        nodes.append(helper.make_node("Concat", parts, [MOMENTS], axis=1))
        model.graph.node.extend(nodes)
        model.graph.output.append(helper.make_tensor_value_info(MOMENTS, TensorProto.FLOAT, None))
        return True

    def shift(self, sums_2C: Vector, slices: int) -> float | None:
        """R of a scan, of the sums over its slices of `moments`.

        With m', v' the mean and variance of what a batch norm gets, per channel (as `Profile` in
        `personalization.iop_fl.batch_norm`):

            d_m = (m' - m) / sqrt(v + eps)        d_v = 1/2 log((v' + eps) / (v + eps))
            R   = exp(mean over l of log (1/2 sum over means and variances of D_l / usual_l))

        D_l is the mean over the channels of d^2. None where a batch norm has no channel that is on, or where
        the network gave no numbers.
        """
        ratios, start = [], 0
        for norm, usual in zip(self.norms, self.usual, strict=True):
            length = len(norm.mean)
            mean = sums_2C[start : start + length] / slices
            square = sums_2C[start + length : start + 2 * length] / slices
            start += 2 * length
            on = np.abs(norm.gamma) >= _LEAST_GAMMA
            if not on.any():
                return None
            gamma, variance = norm.gamma[on], norm.variance[on] + _EPSILON
            moved = (mean[on] - norm.beta[on]) / gamma
            wider = np.maximum(square[on] - mean[on] ** 2, 0) / gamma**2 + _EPSILON / variance
            apart = np.array([np.mean(moved**2), np.mean((np.log(wider) / 2) ** 2)])
            ratios.append(float(np.mean((apart + _NO_SHIFT) / (usual + _NO_SHIFT))))
        found = math.exp(float(np.mean(np.log(ratios))))
        return found if math.isfinite(found) else None

    def _tensors(self, model: ModelProto) -> list[str] | None:
        """What the convolution before each batch norm gives, by the bias that the norm was folded into."""
        from onnx import numpy_helper

        biases = {
            tensor.name: numpy_helper.to_array(tensor)
            for tensor in model.graph.initializer
            if len(tensor.dims) == 1 and tensor.data_type == 1
        }
        given = [
            (node.output[0], biases[node.input[2]])
            for node in model.graph.node
            if node.op_type == "Conv" and len(node.input) > 2 and node.input[2] in biases
        ]
        found = []
        for norm in self.norms:
            length = len(norm.mean)
            own = (bias for bias in self.biases.get(length, (np.zeros(length),)))
            folded = [norm.beta + (bias - norm.mean) * norm.scale for bias in own]
            at = [
                name
                for name, bias in given
                if len(bias) == length and any(np.allclose(bias, each, 1e-4, 1e-5) for each in folded)
            ]
            if len(at) != 1:
                return None
            found.append(at[0])
        return found


def _norm(state: Mapping[str, NDArray[Any]], path: str) -> Norm:
    mean, variance = (state[f"{path}{end}"].astype(np.float64) for end in (_MEAN, _VARIANCE))
    gamma = state.get(f"{path}.weight", np.ones_like(mean)).astype(np.float64)
    beta = state.get(f"{path}.bias", np.zeros_like(mean)).astype(np.float64)
    return Norm(beta, gamma, mean, variance)


class MomentSums:
    """Sums of `moments` over the slices or patches of a scan."""

    def __init__(self) -> None:
        self.sums_2C: Vector | None = None
        self.slices = 0

    def add(self, moments_S2C: NDArray[np.float32] | None) -> None:
        """Take the next slices'; None of a graph without them."""
        if moments_S2C is None:
            return
        found = moments_S2C.sum(axis=0, dtype=np.float64)
        self.sums_2C = found if self.sums_2C is None else self.sums_2C + found
        self.slices += len(moments_S2C)


@dataclass(frozen=True)
class Reference:
    """What the scans of a network are compared with: its norms, its members' fingerprint, or both."""

    norms: Norms | None = None
    fingerprint: Fingerprint | None = None

    @classmethod
    def of(cls, behind: Artefact, network: Artefact[NetworkManifest]) -> Reference:
        """That of a network, by the version that was trained: the one that hospitals' own are made from.

        Reads the weights. What cannot be read is left out: an answer does not depend on it.
        """
        norms = fingerprint = None
        if SPREAD in behind.manifest.files and network.manifest.precision is None:
            # A model's files may be anything.
            with suppress(Exception):
                norms = Norms.of(behind.read(SPREAD), network.read(WEIGHTS))
        if FINGERPRINT in behind.manifest.files:
            with suppress(StoreError):
                fingerprint = fingerprint_of(behind)
        return cls(norms, fingerprint)

    def shift_of(self, seen: MomentSums, prepared: Prepared | PreparedVolume) -> tuple[float, ShiftAt] | None:
        """R of a scan at the norms where the network told their moments, else by the fingerprint; None where
        there is neither.

        The second is the shift of field, spectrum and quantiles (`model_store.lens`) of one slice in sixteen,
        or of the volume, over what is natural.
        """
        if self.norms is not None and seen.sums_2C is not None:
            found = self.norms.shift(seen.sums_2C, seen.slices)
            return None if found is None else (found, "norms")
        if self.fingerprint is None:
            return None
        try:
            shifts = self.fingerprint.shifts(seen_of([(0, images_of(prepared)[::_ONE_IN])]))
        except (ValueError, KeyError):
            # A fingerprint of other images, or a scan of one value.
            return None
        shift = mean_shift(shifts)
        return (shift, "fingerprint") if math.isfinite(shift) else None
