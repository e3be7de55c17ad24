"""Clip an update, add Gaussian noise to it, and list the release: `training.privacy` at the hospital.

    u <- x - w                            over the floating tensors of the group, in float64
    u <- u min(1, C / ||u||)
    y <- w + round((u + z C n) / g) g     n standard normal, g a power of two near z C / 2^20

Integer tensors are sent as they were received. The grid g, which does not depend on the data, hides the low
bits of the sum, by which floating-point noise can betray the value that it was added to (Mironov, CCS 2012).

The noise is a ChaCha20 stream under the hospital's secret key and a digest of the release: key, group, phase,
round, w and u. A repeated step therefore sends the same bytes, which counts once. A step that is repeated
with other weights gets noise of its own: two releases with one noise would show the difference of their
updates. The hospital's list of releases is written before one leaves, so that a killed process never sends
what is not on it. A list for several runs bounds the epsilon of all of them together; a run has a key of its
own, so that the same update in another run has other noise and another digest.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray
from scipy.special import ndtri

from training.algorithm import Phase, State
from training.engine.egress import Outgoing, SiteSpec
from training.engine.folder import RELEASES, Release, SiteFolder
from training.errors import SiteFailed
from training.privacy import Noising, epsilon_of, spent

_NONCE = bytes(16)  # every stream has a key of its own
_CHUNK = 2**20


def with_noise(
    phase: Phase,
    round_: int,
    site: SiteSpec,
    received: Mapping[str, State],
    outgoing: Outgoing,
    own: SiteFolder,
) -> Outgoing:
    """Clip and noise the groups that the run or the hospital wants so, and note what it cost.

    Raises SiteFailed when the hospital's epsilon would be exceeded, or an update cannot be clipped.
    """
    how = {
        group.name: noising
        for group in phase.uploads
        if outgoing.uploads.get(group.name) and (noising := site.noising(group)) is not None
    }
    if not how:
        return outgoing
    updates = {
        name: clipped_update(outgoing.uploads[name], received[name], each.clip) for name, each in how.items()
    }
    key = own.key()
    ids = {
        name: identify(key, name, phase.name, round_, each, received[name], updates[name])
        for name, each in how.items()
    }
    before = own.releases()
    after = before | {ids[name]: Release(name, each.noise, own.run) for name, each in how.items()}
    _check_budget(site, before.values(), after.values())
    if after != before:
        own.note_releases(after)
    uploads = dict(outgoing.uploads)
    for group in phase.uploads:
        if (name := group.name) in how:
            sent = noised(updates[name], received[name], how[name], key, ids[name])
            uploads[name] = group.repair(sent, received[name]) if group.repair else sent
    here = [(release.group, release.noise) for release in after.values() if release.run == own.run]
    return replace(outgoing, uploads=uploads, privacy=spent(here, how, site.delta))


def _check_budget(site: SiteSpec, before: Collection[Release], after: Collection[Release]) -> None:
    demand = site.demand
    if demand is None or demand.epsilon is None:
        return
    if (needed := epsilon_of([release.noise for release in after], demand.delta)) > demand.epsilon:
        runs: dict[str, list[float]] = {}
        for release in before:
            runs.setdefault(release.run, []).append(release.noise)
        # The server gets this, too: no path of the hospital's.
        each = ", ".join(
            f"{epsilon_of(noises, demand.delta):.3g} in run {run}" for run, noises in runs.items()
        )
        raise SiteFailed(
            f"the hospital's epsilon of {demand.epsilon:g} is used up: this step would make it {needed:.3g} "
            f"at delta {demand.delta:g}; nothing more leaves with noise. Spent by its {RELEASES}: "
            f"{each or 'nothing yet'}"
        )


def clipped_update(state: State, received: State, clip: float) -> dict[str, torch.Tensor]:
    """u of every floating tensor, in float64, with a norm of at most `clip`.

    Raises SiteFailed for tensors that were not received, and for an update that is not finite.
    """
    if {(name, t.shape, t.dtype) for name, t in state.items()} != {
        (name, t.shape, t.dtype) for name, t in received.items()
    }:
        raise SiteFailed(
            "its upload has other tensors than those it received, of which it would be an update"
        )
    update = {
        name: tensor.cpu().double() - received[name].cpu().double()
        for name, tensor in state.items()
        if tensor.is_floating_point()
    }
    norm = math.sqrt(math.fsum(float(part.square().sum()) for part in update.values()))
    if not math.isfinite(norm):
        raise SiteFailed("its update: expected finite values, found others; its training diverged")
    factor = min(1.0, clip / norm) if norm else 1.0
    return {name: part * factor for name, part in update.items()}


def identify(
    key: bytes,
    group: str,
    phase: str,
    round_: int,
    how: Noising,
    received: State,
    update: Mapping[str, torch.Tensor],
) -> str:
    """The digest of a release, by which its noise is drawn and by which it counts once."""
    keyed = hashlib.sha256(key).hexdigest()
    return digest_of([keyed, group, phase, round_, how.clip, how.noise], received, update)


def digest_of(head: Sequence[str | float], *contents: Mapping[str, torch.Tensor]) -> str:
    """The digest of tensors, in the order of their names, and of what describes them."""
    digest = hashlib.sha256(json.dumps(head).encode())
    for content in contents:
        for name in sorted(content):
            tensor = content[name].detach().cpu().contiguous()
            digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
            digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def noised(
    update: Mapping[str, torch.Tensor], received: State, how: Noising, key: bytes, identity: str
) -> State:
    """w + u + noise, with the types of `received`. Tensors without an update are the received ones."""
    deviation = how.noise * how.clip
    grid = 2.0 ** (math.floor(math.log2(deviation)) - 20)
    stream = Cipher(
        algorithms.ChaCha20(hmac.digest(key, identity.encode(), "sha256"), _NONCE), mode=None
    ).encryptor()
    sent: State = {}
    for name, tensor in received.items():
        if name not in update:
            sent[name] = tensor.clone()
            continue
        noisy = update[name].flatten().numpy().copy()
        for begin in range(0, noisy.size, _CHUNK):
            part = noisy[begin : begin + _CHUNK]
            part += deviation * _standard_normal(stream.update(bytes(8 * part.size)))
            part[:] = np.round(part / grid) * grid
        total = tensor.cpu().double() + torch.from_numpy(noisy).view(tensor.shape)
        sent[name] = total.to(tensor.dtype)
    return sent


def _standard_normal(stream: bytes) -> NDArray[np.float64]:
    """One value per 8 bytes, by the inverse of the distribution function.

    52 bits and a half are exact in a double, and never 0 or 1.
    """
    uniform = ((np.frombuffer(stream, "<u8") >> np.uint64(12)) + 0.5) * 2.0**-52
    values: NDArray[np.float64] = ndtri(uniform)
    return values
