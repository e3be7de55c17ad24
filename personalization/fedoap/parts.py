"""Split a FedOAP network's state into the personal part, the shared part and the token bank.

rho_k, personal: the query stage, W_q and the spatial adapter. gamma, shared: everything else. The bank is
separate: it has the sites' mean tokens. Tensors are assigned to the three by name.

Legend: S sites, N tokens, D features.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from personalization.errors import StateError
from personalization.networks.fedoap import BANK
from personalization.state import State

QUERY = ("query_stage.", "to_query.")
ADAPTER = ("adapter.",)
KEY_VALUE = ("keyvalue_stage.", "to_key.", "to_value.")

# A personal tensor can start from the shared tensor of the same shape and role.
_TWINS = {"query_stage.": "keyvalue_stage.", "to_query.": "to_key."}


def split(state: Mapping[str, Tensor], *, own_keys: bool = False) -> tuple[State, State]:
    """Split a state without the bank into (shared, personal) tensors, which are not copied.

    With `own_keys` the key/value stage, W_k and W_v are personal too: plain self-attention at each site.
    """
    prefixes = (*QUERY, *ADAPTER, *(KEY_VALUE if own_keys else ()))
    personal = {name: tensor for name, tensor in state.items() if name.startswith(prefixes)}
    shared = {name: t for name, t in state.items() if name not in personal and name not in BANK}
    return shared, personal


def start_personal(shared: Mapping[str, Tensor], drawn: Mapping[str, Tensor]) -> State:
    """Make an initial personal part: query stage and W_q from the shared key/value stage and W_k.

    An untrained query stage would pass random features through the residual to a trained decoder. Tensors
    without a shared counterpart come from `drawn`, the personal part of a newly initialised network. All
    tensors are copies.
    """
    return {name: _twin(name, shared, drawn, tensor).clone() for name, tensor in identity(drawn).items()}


def identity(personal: Mapping[str, Tensor]) -> State:
    """Copy a personal part, with the adapter set to the identity (its last convolution is zero)."""
    return {
        name: torch.zeros_like(tensor) if name.startswith("adapter.outer.") else tensor.detach().clone()
        for name, tensor in personal.items()
    }


def bank_state(entries: Mapping[str, State], features: int, absent: Collection[str] = ()) -> State:
    """Make a network's bank buffers from entries by site, sorted, each {"key": [N, D], "value": [N, D]}.

    `features` is D, needed for an empty bank. `absent` sites keep their place but are not attended to, such
    as the site that the network is for. Raises StateError for entries that do not fit each other.
    """
    names = sorted(entries)
    try:
        key, value = (
            torch.stack([entries[name][part] for name in names]) if names else torch.zeros(0, 0, features)
            for part in ("key", "value")
        )
    except (RuntimeError, KeyError) as error:
        raise StateError(f"bank of {', '.join(names)}: its entries do not fit each other: {error}") from error
    present = torch.tensor([name not in absent for name in names], dtype=torch.bool)
    return dict(zip(BANK, (key, value, present), strict=True))


def _twin(name: str, shared: Mapping[str, Tensor], drawn: Mapping[str, Tensor], otherwise: Tensor) -> Tensor:
    for prefix, twin in _TWINS.items():
        if name.startswith(prefix):
            other = twin + name.removeprefix(prefix)
            return shared.get(other, drawn.get(other, otherwise))
    return otherwise
