"""Differential privacy of the updates that leave a hospital: what is asked for, and its cost in epsilon.

A hospital clips the update u = x - w of a group (x its own tensors, w those that it received) to the norm C,
adds Gaussian noise of standard deviation z C to every value, and sends w + u + noise
(`training.engine.release` does this). The unit is the hospital: the guarantee compares its data with any
other data that it could have had. Two clipped updates are at most 2 C apart, so that releases with the noise
z_1, z_2, .. are together a Gaussian mechanism with

    mu = 2 sqrt(sum_t 1 / z_t^2)                 Dong, Roth, Su, JRSS B 2022, Corollary 3.3; exact, and valid
                                                 where each update depends on the releases before it

    delta(epsilon) = Phi(mu / 2 - epsilon / mu) - exp(epsilon) Phi(-mu / 2 - epsilon / mu)
                                                 Balle, Wang, ICML 2018, Theorem 8

It holds against the operator, who sees every release and knows which hospitals are in a round. The draw of a
round's hospitals therefore amplifies nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat
from scipy.special import log_ndtr, ndtr

from training.algorithm import GroupKind


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Noising(_Strict):
    """How the updates of a group are clipped and noised."""

    clip: FiniteFloat = Field(gt=0, description="largest norm of an update, over all its tensors")
    noise: FiniteFloat = Field(gt=0, description="standard deviation of the noise of every value, in clips")

    def largest_norm(self, values: int) -> float:
        """The norm that a clipped update of so many values with this noise does not exceed, but by chance.

        The noise alone has at most the norm z C (sqrt(values) + 4), except with probability exp(-8) (Laurent,
        Massart, Annals of Statistics 2000).
        """
        return self.clip * (1 + self.noise * (math.sqrt(values) + 4))

    def stricter(self, other: Noising | None) -> Noising:
        """The smaller clip and the larger noise in clips; both lower or keep the epsilon."""
        if other is None:
            return self
        return Noising(clip=min(self.clip, other.clip), noise=max(self.noise, other.noise))


class RunPrivacy(_Strict):
    """Privacy that the operator declares, by the name of the group. A hospital may ask for more."""

    delta: float = Field(1e-5, gt=0, lt=1, description="probability for which epsilon does not hold")
    groups: dict[str, Noising] = Field(min_length=1, description="group -> clip and noise")


class PrivacyDemand(_Strict):
    """A hospital's own conditions, by kind of group: what is of a kind leaves with noise or not at all."""

    delta: float = Field(1e-5, gt=0, lt=1, description="probability for which epsilon does not hold")
    epsilon: FiniteFloat | None = Field(
        None,
        gt=0,
        description="of all that leaves with noise, at most; then nothing more leaves. On one machine it is "
        "of a run, on a network of all runs of a state folder",
    )
    kinds: dict[GroupKind, Noising] = Field(min_length=1, description="kind -> clip and noise, at least")


@dataclass(frozen=True)
class Spent:
    """Privacy that a group has cost a hospital so far in a run. `releases` counts different uploads."""

    clip: float
    noise: float
    releases: int
    epsilon: float
    delta: float


def epsilon_of(noises: Iterable[float], delta: float) -> float:
    """The epsilon at `delta` of releases with these noises (in clips) together; 0 without a release."""
    mu = 2 * math.sqrt(math.fsum(noise**-2 for noise in noises))
    if mu == 0 or _delta(0.0, mu) <= delta:
        return 0.0
    # From above by the tail bound of a Gaussian.
    most = mu**2 / 2 + mu * math.sqrt(2 * math.log(1 / delta))
    # The import takes half a second and only private runs need it, so it is not done at start-up.
    from scipy.optimize import brentq

    return float(brentq(lambda epsilon: _delta(epsilon, mu) - delta, 0.0, most, xtol=1e-9))


def _delta(epsilon: float, mu: float) -> float:
    # exp(epsilon) alone may overflow; the product is at most 1.
    second = math.exp(epsilon + float(log_ndtr(-mu / 2 - epsilon / mu)))
    return float(ndtr(mu / 2 - epsilon / mu)) - second


def spent(
    releases: Iterable[tuple[str, float]], used: Mapping[str, Noising], delta: float
) -> dict[str, Spent]:
    """What each group of `used` has cost, from (group, noise) of every release."""
    noises: dict[str, list[float]] = {name: [] for name in used}
    for group, noise in releases:
        if group in noises:
            noises[group].append(noise)
    return {
        name: Spent(how.clip, how.noise, len(noises[name]), epsilon_of(noises[name], delta), delta)
        for name, how in used.items()
    }
