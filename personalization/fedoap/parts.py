"""What of a FedOAP network is personal, what is shared, and the bank beside both.

rho_k, personal: the query stage, W_q and the spatial adapter. gamma, shared: everything else. The bank is
neither: it is made of the sites' mean tokens. All three are taken by name from one state.

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

# What a personal tensor may start from: the shared one of the same shape and place.
_TWINS = {"query_stage.": "keyvalue_stage.", "to_query.": "to_key."}


def split(state: Mapping[str, Tensor], *, own_keys: bool = False) -> tuple[State, State]:
    """(shared, personal) tensors of a network's state, the bank left out; the tensors are the same objects.

    With `own_keys` the key/value stage, W_k and W_v are personal too: plain self-attention at each site.
    """
    prefixes = (*QUERY, *ADAPTER, *(KEY_VALUE if own_keys else ()))
    personal = {name: tensor for name, tensor in state.items() if name.startswith(prefixes)}
    shared = {name: t for name, t in state.items() if name not in personal and name not in BANK}
    return shared, personal


def start_personal(shared: Mapping[str, Tensor], drawn: Mapping[str, Tensor]) -> State:
    """A personal part to begin with: query stage and W_q from the shared key/value stage and W_k.

    An untrained query stage would send random features through the residual into a trained decoder. What has
    no shared twin is taken from `drawn`, the personal part of a freshly drawn network. Copies.
    """
    return {name: _twin(name, shared, drawn, tensor).clone() for name, tensor in identity(drawn).items()}


def identity(personal: Mapping[str, Tensor]) -> State:
    """The personal part with an adapter that changes nothing (its last convolution zero)."""
    return {
        name: torch.zeros_like(tensor) if name.startswith("adapter.outer.") else tensor.detach().clone()
        for name, tensor in personal.items()
    }


def bank_state(entries: Mapping[str, State], features: int, absent: Collection[str] = ()) -> State:
    """The bank's buffers of a network: entries by site, sorted, each {"key": [N, D], "value": [N, D]}.

    `features` is D, the only thing that an empty bank still has. `absent` sites have a place and are not
    attended to, such as the site that the network is for. Raises StateError for entries that do not fit.
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
