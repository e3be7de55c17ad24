"""Measure batch-norm statistics on a hospital's images, and recalibrate a network on them (AdaBN).

With fixed statistics, a scan's prediction does not depend on other scans, and an onnx graph needs no batch.

Legend: N images, P patients, C channels, L batch norms.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor, nn

from personalization.cancellation import CancelCheck, never_cancelled
from personalization.errors import RoutingError
from personalization.iop_fl.layers import keep_statistics
from personalization.iop_fl.network import batches, routed_layers, share_copy
from personalization.iop_fl.space import GLOBAL, RoutingSpace
from personalization.networks.capabilities import (
    BatchNorm,
    moving_norms,
    required_norms,
    running,
    spatial_axes,
)

# Weight of the federation's statistics, as a number of images of the hospital
PRIOR_IMAGES = 4.0


@dataclass(frozen=True)
class Profile:
    """How far the inputs of a network's batch norms are from their running statistics m, v.

    With m', v' the mean and variance over all images, per channel

        d_m = (m' - m) / sqrt(v + eps)        d_v = 1/2 log((v' + eps) / (v + eps))

    Attributes:
        layers: path of every batch norm, in the order of `nn.Module.modules`.
        means, variances: m' and v' [C] of every layer, float64.
        shift: [L, 2] float64, the mean over the channels of d_m^2 and of d_v^2.
        sampling: [L, 2] float64, the mean over the channels of the variance of d_m and of d_v that comes from
            the choice of the patients: the jackknife over them (Efron, 1982). None of one patient.
        patients: how many there are.
    """

    layers: tuple[str, ...]
    means: tuple[Tensor, ...]
    variances: tuple[Tensor, ...]
    shift: Tensor
    sampling: Tensor | None
    patients: int


class Measuring:
    """Notes the moments of every batch norm's input, patient by patient, while the network runs.

        with Measuring(network, patients) as measuring:
            for indices in ...:
                network(measuring.images(indices, images))
        found = measuring.profile()

    A sum per patient and channel is kept, not one per image. The network must be in eval mode, so that its
    running statistics stay.
    """

    def __init__(self, network: nn.Module, patients: Sequence[Hashable], first: int | None = None) -> None:
        """`patients` has that of every image; `first` is the number of batch norms to measure, None: all.

        Raises NetworkError for a network without a norm to move.
        """
        norms = required_norms(network, "a shift is measured at batch norms")
        self._norms = dict(list(norms.items())[:first])
        numbers = {patient: number for number, patient in enumerate(dict.fromkeys(patients))}
        self._patient_N = torch.tensor([numbers[patient] for patient in patients])
        self._counts_P = torch.bincount(self._patient_N, minlength=len(numbers)).double()
        self._sums: dict[str, Tensor] = {}
        self._rows: Tensor = self._patient_N[:0]
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> Measuring:
        for path, norm in self._norms.items():
            self._handles.append(
                norm.register_forward_pre_hook(lambda _norm, inputs, path=path: self._note(path, inputs[0]))
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def images(self, indices: Tensor | slice, images_NCHW: Tensor) -> Tensor:
        """The images at these indices, which the network must see next."""
        self._rows = self._patient_N[indices]
        return images_NCHW[indices]

    @contextmanager
    def stopping(self, first: int | None) -> Iterator[None]:
        """End a pass behind the last of the `first` batch norms; None: do not."""
        last = next(reversed(self._norms.values()))
        handle = None if first is None else last.register_forward_hook(_stop)
        try:
            yield
        except _StopAtLayer:
            pass
        finally:
            if handle is not None:
                handle.remove()

    def _note(self, path: str, features_NC: Tensor) -> None:
        mean, variance = image_moments(features_NC)
        found = torch.stack([mean, variance + mean.square()], dim=1)
        if path not in self._sums:
            self._sums[path] = found.new_zeros(len(self._counts_P), *found.shape[1:])
        self._sums[path].index_add_(0, self._rows.to(found.device), found)

    def profile(self) -> Profile:
        """What was found. Raises RoutingError for a batch norm that the network does not use."""
        unused = [path for path in self._norms if path not in self._sums]
        if unused:
            raise RoutingError(f"{unused[0]}: the network does not use this layer, so it has no statistics")
        counts, patients = self._counts_P, len(self._counts_P)
        shift, sampling, means, variances = [], [], [], []
        for path, norm in self._norms.items():
            sums_P2C = self._sums[path].cpu()
            mean, variance = _moments(sums_P2C.sum(dim=0), counts.sum())
            means.append(mean)
            variances.append(variance)
            shift.append(_standardised(norm, mean, variance).square().mean(dim=-1))
            if patients > 1:
                left = _moments(sums_P2C.sum(dim=0) - sums_P2C, (counts.sum() - counts)[:, None])
                without_P2C = _standardised(norm, *left)
                spread = (without_P2C - without_P2C.mean(dim=0)).square().sum(dim=0)
                sampling.append(((patients - 1) / patients * spread).mean(dim=-1))
        return Profile(
            tuple(self._norms),
            tuple(means),
            tuple(variances),
            torch.stack(shift),
            torch.stack(sampling) if sampling else None,
            patients,
        )


@torch.no_grad()
def profile(
    network: nn.Module,
    images_NCHW: Tensor,
    patients: Sequence[Hashable],
    batch_size: int = 16,
    check_cancelled: CancelCheck = never_cancelled,
    first: int | None = None,
) -> Profile:
    """Measure the shift of images [N, C, ...] at a network's batch norms, in one forward pass as it is.

    `patients` has that of every image. With `first` the pass ends behind so many batch norms. Raises
    NetworkError for a network without batch norm to move, and RoutingError for no images, or another number
    of patients.
    """
    if len(patients) != len(images_NCHW):
        raise RoutingError(f"patients: expected one per image ({len(images_NCHW)}), found {len(patients)}")
    device = next(network.parameters()).device
    network.eval()
    with Measuring(network, patients, first) as measuring:
        done = 0
        for batch in batches(images_NCHW, batch_size):
            check_cancelled()
            with measuring.stopping(first):
                network(measuring.images(slice(done, done + len(batch)), images_NCHW).to(device))
            done += len(batch)
    return measuring.profile()


def _moments(sums_2C: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance [..., C] from sums [..., 2, C] of means and mean squares over so many images."""
    mean, square = (sums_2C / count[..., None]).unbind(dim=-2)
    return mean, (square - mean.square()).clamp(min=0)


def _standardised(norm: BatchNorm, mean_C: Tensor, variance_C: Tensor) -> Tensor:
    """d_m and d_v [..., 2, C] of a layer (`Profile`)."""
    usual, spread = (statistic.double().cpu() for statistic in running(norm))
    moved = (mean_C - usual) / (spread + norm.eps).sqrt()
    return torch.stack([moved, ((variance_C + norm.eps) / (spread + norm.eps)).log() / 2], dim=-2)


def bake_statistics(
    network: nn.Module,
    images_NCHW: Tensor,
    batch_size: int = 16,
    prior: Mapping[str, Tensor] | None = None,
    prior_images: float = 0.0,
    check_cancelled: CancelCheck = never_cancelled,
) -> nn.Module:
    """Set the running statistics of every batch norm to those of its input over all images, in place.

    Layers are measured one after the other, with the earlier layers already recalibrated (1.7). The variance
    is the total variance within and between images, as batch norm would use on one batch of all images; so
    `batch_size` only bounds the memory. With `prior` (a state with running statistics of the same names) mean
    and variance move towards it with weight prior_images / (N + prior_images), as if it were that many
    images, because few images give poor statistics (Schneider et al., NeurIPS 2020, 2).

    Takes one forward pass if the images fit into one batch, otherwise about half a pass per batch norm.
    Leaves the network in eval mode and returns it. `check_cancelled` is called before every batch of a pass,
    and may raise. Raises RoutingError for no images, or a `prior_images` below 0 or without a prior.
    """
    if prior_images < 0 or (prior_images and prior is None):
        raise RoutingError(f"prior images: expected 0 or more, and a prior, found {prior_images}")
    weight = prior_images / (max(len(images_NCHW), 1) + prior_images)

    def settle(name: str, norm: BatchNorm, mean_C: Tensor, variance_C: Tensor) -> None:
        for field, found in (("running_mean", mean_C), ("running_var", variance_C)):
            if weight and prior is not None:
                found = weight * prior[f"{name}.{field}"].to(found) + (1 - weight) * found
            getattr(norm, field).copy_(found)

    return _layer_by_layer(network, images_NCHW, batch_size, settle, check_cancelled)


def blend_statistics(
    network: nn.Module,
    images_NCHW: Tensor,
    doses: Sequence[float],
    batch_size: int = 16,
    check_cancelled: CancelCheck = never_cancelled,
) -> nn.Module:
    """Move every batch norm's running statistics towards those of its input over the images, in place.

    Layer l is moved by its dose a, between 0 (as it was) and 1 (the images' alone), to the statistics of the
    mixture of both distributions, so that the variance has the distance of the means in it:

        mean <- (1 - a) m + a m'        variance <- (1 - a) v + a v' + a (1 - a) (m - m')^2

    `doses` has one number per batch norm, in the order of `nn.Module.modules`; see `doses_by_depth`. Most
    published code leaves out the last term of the variance. Passes, cost and errors are those of
    `bake_statistics`; raises NetworkError too, for a network without batch norm to move.
    """
    norms = list(required_norms(network, "statistics are moved").values())
    if len(doses) != len(norms) or not all(0 <= dose <= 1 for dose in doses):
        raise RoutingError(
            f"doses: expected {len(norms)} numbers within 0..1, one per batch norm, found {list(doses)}"
        )
    dose_of = dict(zip(norms, doses, strict=True))

    def settle(_name: str, norm: BatchNorm, mean_C: Tensor, variance_C: Tensor) -> None:
        dose, (mean, variance) = dose_of[norm], running(norm)
        apart = dose * (1 - dose) * (mean - mean_C).square()
        blend = (1 - dose) * variance + dose * variance_C + apart
        mean.copy_((1 - dose) * mean + dose * mean_C)
        variance.copy_(blend)

    return _layer_by_layer(network, images_NCHW, batch_size, settle, check_cancelled)


def doses_by_depth(network: nn.Module, thirds: tuple[float, float, float]) -> tuple[float, ...]:
    """A dose per batch norm: that of the first, the second or the last third of them, from image to mask."""
    count = len(moving_norms(network))
    return tuple(thirds[3 * index // count] for index in range(count))


def _layer_by_layer(
    network: nn.Module,
    images_NCHW: Tensor,
    batch_size: int,
    settle: Callable[[str, BatchNorm, Tensor, Tensor], None],
    check_cancelled: CancelCheck,
) -> nn.Module:
    """Give `settle` the name, the layer, and the mean and variance [C] of the input of every batch norm.

    A layer is measured when the layers before it have been settled.
    """
    norms = moving_norms(network).items()
    chunks = batches(images_NCHW, batch_size)
    network.eval()

    def measured(name: str, norm: BatchNorm, means_NC: Tensor, variances_NC: Tensor) -> None:
        mean = means_NC.mean(dim=0)
        settle(name, norm, mean, (variances_NC + (means_NC - mean).square()).mean(dim=0))

    with torch.no_grad():
        if len(chunks) == 1:
            handles = [
                norm.register_forward_pre_hook(
                    lambda norm, inputs, name=name: measured(name, norm, *image_moments(inputs[0]))
                )
                for name, norm in norms
            ]
            try:
                check_cancelled()
                network(chunks[0])
            finally:
                for handle in handles:
                    handle.remove()
        else:
            for name, norm in norms:
                moments = []
                for chunk in chunks:
                    check_cancelled()
                    moments.append(image_moments(_input_of(norm, network, chunk)))
                means, variances = (torch.cat(parts) for parts in zip(*moments, strict=True))
                measured(name, norm, means, variances)
    return network


def recalibrate_statistics(
    space: RoutingSpace,
    network: nn.Module,
    images_NCHW: Tensor,
    *,
    batch_size: int = 16,
    prior_images: float = PRIOR_IMAGES,
    check_cancelled: CancelCheck = never_cancelled,
) -> nn.Module:
    """Copy a routed network with recalibrated batch-norm statistics. Its coefficients stay per image.

    Works as `bake_statistics`, with the global model's running statistics as the prior. The experts are
    shared. `check_cancelled` is called before every batch of a pass, and may raise.
    """
    if not routed_layers(network):
        raise RoutingError(f"expected a routed network (see `route`), found a plain {type(network).__name__}")
    baked = share_copy(network)
    keep_statistics(baked, images_NCHW)
    return bake_statistics(
        baked, images_NCHW, batch_size, space.experts[GLOBAL], prior_images, check_cancelled
    )


class _StopAtLayer(Exception):
    """Stops a forward pass at a layer and carries its input, so that later layers are not computed."""

    def __init__(self, features: Tensor) -> None:
        super().__init__()
        self.features = features


def _stop(_layer: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
    raise _StopAtLayer(inputs[0])


def _input_of(layer: nn.Module, network: nn.Module, images: Tensor) -> Tensor:
    def stop(_layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        raise _StopAtLayer(inputs[0])

    handle = layer.register_forward_pre_hook(stop)
    try:
        network(images)
    except _StopAtLayer as reached:
        return reached.features
    finally:
        handle.remove()
    raise RoutingError(
        f"{type(layer).__name__}: the network does not use this layer, so it has no statistics"
    )


def image_moments(features_NC: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the mean and the variance [N, C] of each image and channel, in float64.

    By a norm, which takes a third of the time of `torch.var_mean`.
    """
    axes = spatial_axes(features_NC)
    mean = features_NC.mean(dim=axes, keepdim=True)
    length = torch.linalg.vector_norm(features_NC - mean, dim=axes).double()
    return mean.flatten(1).double(), length.square() / features_NC.shape[2:].numel()
