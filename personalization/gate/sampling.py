"""A few patients with masks bound the change of Dice between two networks: which to draw, and what they say.

The answers of a candidate and its parent differ much for few patients and little for most, and the change of
Dice is about as large as the difference at most. So n of the M patients with answers that differ are drawn
with

    p_i = 1/4 1/M + 3/4 d_i / sum_j d_j        d_i = 1 - Dice of the candidate's with the parent's answers

one from each of n strata of equal probability, along the patients in order of d (systematic sampling). A
patient in two strata counts twice. Where answers are equal nothing changes, and no mask is needed. Each draw
is weighed by its probability,

    mean = M/N 1/n sum_i z_i,        z_i = change_i / (M p_i)

and Student's t of the n values z_i bounds it, as if they were drawn independently (Hansen and Hurwitz,
1943), which is cautious for strata. The quarter that is drawn alike keeps |z_i| below 4 |change_i|; the
rest draws the rare patient who is harmed. Of patients drawn alike, six to twenty miss that one most of the
time, and a bound that has not seen the harm is wrong: in simulations it held in 31 to 67 % of the cases
where 6 % of the patients collapse, and this one in 96 % or more. An empirical Bernstein bound (Maurer and
Pontil, 2009) holds for any distribution, but with 17 patients it is wider than 1.

Legend: N patients of the cohort, M of them with answers that differ, n draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from personalization.errors import AdaptationError
from personalization.gate.bounds import Bounds, bounds

# Share of the draws that are alike for all patients with answers that differ.
ALIKE = 0.25
# Fewer bound nothing worth knowing, and a patient with equal answers is none of them.
FEWEST = 2


@dataclass(frozen=True)
class Draw:
    """A patient who was drawn: `times`, with `probability` each time, in this `stratum` of the first time."""

    patient: str
    probability: float
    times: int
    stratum: int


def draw(disagreement: Mapping[str, float], masks: int, seed: int) -> tuple[Draw, ...]:
    """Draw patients by how much the two answers disagree, in order of their strata.

    Args:
        disagreement: d of every patient of the cohort, 0 where the answers are equal.
        masks: n, at least 2. Where no more patients than this disagree, all of these are drawn, alike.
        seed: determines the draws, with the names.

    Raises:
        AdaptationError: fewer than two patients disagree, or n is below 2.
    """
    there = (name for name, d in disagreement.items() if d > 0)
    differing = sorted(there, key=lambda name: (disagreement[name], name))
    count = len(differing)
    if count < FEWEST or masks < FEWEST:
        raise AdaptationError(
            f"masks: expected at least {FEWEST} masks and as many patients for whom the answers of candidate "
            f"and parent differ, found {masks} and {count} of {len(disagreement)}"
        )
    if masks >= count:
        return tuple(Draw(name, 1 / count, 1, number) for number, name in enumerate(differing))
    d = np.array([disagreement[name] for name in differing])
    p = ALIKE / count + (1 - ALIKE) * d / d.sum()
    start = np.random.default_rng(seed).random()
    ticks = (start + np.arange(masks)) / masks
    places = np.minimum(np.searchsorted(np.cumsum(p), ticks, side="right"), count - 1)
    found = []
    for place in dict.fromkeys(places.tolist()):
        strata = np.flatnonzero(places == place)
        found.append(Draw(differing[place], float(p[place]), len(strata), int(strata[0])))
    return tuple(found)


def estimate(draws: Sequence[Draw], changes: Mapping[str, float], patients: int, differing: int) -> Bounds:
    """The mean change over the cohort's patients, with its bounds, from the changes of all drawn patients.

    Args:
        draws: of `draw`.
        changes: change of Dice by patient, of every drawn one.
        patients: N, of the whole cohort.
        differing: patients for whom the answers differ: of the others the change is 0.

    Raises:
        AdaptationError: a drawn patient has no change.
    """
    missing = [each.patient for each in draws if each.patient not in changes]
    if missing:
        raise AdaptationError(f"masks: {len(missing)} of {len(draws)} drawn patients have no mask yet")
    z = [
        value
        for each in draws
        for value in [changes[each.patient] / (differing * each.probability)] * each.times
    ]
    found = bounds(z)
    share = differing / patients
    return Bounds(share * found.mean, share * found.low, share * found.high, found.n)
