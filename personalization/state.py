"""States of networks (named tensors): compare, average and serialise them.

Floating tensors are averaged in float64 and returned in their own type. Integer and boolean buffers (batch
norm's `num_batches_tracked`) are copied, never averaged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors_torch
from torch import Tensor

from personalization.errors import StateError

State = dict[str, Tensor]


def clone(state: Mapping[str, Tensor]) -> State:
    """Copy a state without shared memory and without gradients."""
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def check_compatible(states: Sequence[Mapping[str, Tensor]], labels: Sequence[str] | None = None) -> None:
    """Raise StateError, naming the tensor, unless all states have the first one's names, shapes and types.

    `labels` are names of the states for the message, one each; without them states are numbered.
    """
    for number, state in enumerate(states[1:], start=2):
        _check_pair(states[0], state, labels[number - 1] if labels else f"state {number}")


def check_finite(state: Mapping[str, Tensor], what: str = "state") -> None:
    """Raise StateError naming the first tensor with a NaN or an infinity."""
    for name, tensor in state.items():
        # If the sum is finite, so are all terms. This takes a fifteenth of the time of checking each.
        if not tensor.is_floating_point() or math.isfinite(tensor.sum().item()):
            continue
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            raise StateError(
                f"{what}: tensor '{name}' has {bad} of {tensor.numel()} values that are not finite; "
                "training diverged: lower the learning rate, or look at this site's data"
            )


def ema(previous: Mapping[str, Tensor], current: Mapping[str, Tensor], tau: float) -> State:
    """Compute P <- (1 - tau) P + tau w: IOP-FL's personal model (Eq. 4 with its base point restored).

    The result is a new state that shares no memory; its integer buffers are those of `current`.
    Raises StateError for incompatible states or tau outside [0, 1].
    """
    if not 0 <= tau <= 1:
        raise StateError(f"tau: expected 0..1, found {tau}")
    _check_pair(previous, current, "current state")
    result: State = {}
    for name, old in previous.items():
        new = current[name].detach()
        if old.is_floating_point():
            mixed = (1 - tau) * old.detach().to(torch.float64) + tau * new.to(torch.float64)
            result[name] = mixed.to(old.dtype)
        else:
            result[name] = new.clone()
    return result


def interpolate(start: Mapping[str, Tensor], end: Mapping[str, Tensor], share: float) -> State:
    """Compute start + share (end - start). Integer buffers are those of `start`, at share 1 of `end`.

    Raises StateError for incompatible states.
    """
    _check_pair(start, end, "end")
    if share == 1:
        return clone(end)
    return {
        name: old + share * (end[name].to(old) - old) if old.is_floating_point() else old.clone()
        for name, old in start.items()
    }


class StreamingMean:
    """The weighted mean of states added one by one. It needs memory for one float64 state, for any count.

    Addition is not associative: add in a fixed order (that of the sites) for bit-identical results.
    """

    def __init__(self) -> None:
        self._first: State = {}
        self._sums: State = {}
        self._weight = 0.0
        self._count = 0

    @property
    def count(self) -> int:
        """Number of states added."""
        return self._count

    @property
    def weight(self) -> float:
        """Sum of the weights."""
        return self._weight

    def add(self, state: Mapping[str, Tensor], weight: float, what: str = "state") -> None:
        """Add one state; `what` names it in errors (a site, a round).

        Raises StateError, without changing the mean, for a weight that is not positive and finite, a state
        that does not match the first, or a value that is not finite.
        """
        if not 0 < weight < float("inf"):
            raise StateError(f"{what}: expected a positive weight, found {weight}")
        if self._count:
            _check_pair(self._first, state, what)
        check_finite(state, what)
        if not self._count:
            self._keep_first(state)
        for name, total in self._sums.items():
            total.add_(state[name].detach(), alpha=weight)
        self._weight += weight
        self._count += 1

    def result(self) -> State:
        """Return the mean, each tensor in its own type. Raises StateError if no state was added."""
        if not self._count:
            raise StateError("the mean of no states is undefined; at least one site must take part")
        return {
            name: (self._sums[name] / self._weight).to(first.dtype) if name in self._sums else first.clone()
            for name, first in self._first.items()
        }

    def _keep_first(self, state: Mapping[str, Tensor]) -> None:
        # Floating tensors are kept as expanded scalars, because only their name, shape and type are needed.
        for name, tensor in state.items():
            if tensor.is_floating_point():
                self._first[name] = torch.empty((), dtype=tensor.dtype).expand(tensor.shape)
                self._sums[name] = torch.zeros_like(tensor, dtype=torch.float64, requires_grad=False)
            else:
                self._first[name] = tensor.detach().clone()


def to_safetensors(state: Mapping[str, Tensor]) -> bytes:
    """Serialise a state as a safetensors file. Equal states give equal bytes."""
    # Sorted, contiguous and unshared, because safetensors keeps the given order and rejects shared storage.
    return safetensors_torch.save(
        {
            name: state[name].detach().cpu().clone(memory_format=torch.contiguous_format)
            for name in sorted(state)
        }
    )


def from_safetensors(data: bytes) -> State:
    """Read a state from the bytes of a safetensors file. Raises StateError if they are not one."""
    try:
        return dict(safetensors_torch.load(data))
    except (SafetensorError, ValueError) as error:
        raise StateError(f"weights: not a safetensors file ({len(data)} bytes): {error}") from error


def _check_pair(first: Mapping[str, Tensor], other: Mapping[str, Tensor], what: str) -> None:
    missing, extra = first.keys() - other.keys(), other.keys() - first.keys()
    if missing or extra:
        raise StateError(
            f"{what}: tensors of another network: missing {sorted(missing)[:3] or 'none'}, "
            f"unexpected {sorted(extra)[:3] or 'none'}"
        )
    for name, tensor in first.items():
        found = other[name]
        if tensor.shape != found.shape or tensor.dtype != found.dtype:
            raise StateError(
                f"{what}: tensor '{name}': expected {list(tensor.shape)} {tensor.dtype}, "
                f"found {list(found.shape)} {found.dtype}"
            )
