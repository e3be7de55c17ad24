"""The gate of an adapted routing space: may the candidate be assigned? No label is used.

What a candidate is decides on its gate. A dose that the service itself computed in closed form from the scans
is bounded, and has `BY_SHIFT`: a veto. What was learned, or named by a person, has to show more: `ROUTING`.
What a playbook chose, of an artefact without the members' spread, has `PRACTISED`.

Limits were set by reasoning and on phantoms. One of them, agreement, was raised with knowledge of labels from
outside. To add a check, write a function below and add it to its tuple.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from personalization.gate.check import Check, check
from personalization.gate.masks import (
    MIN_COMPONENT,
    Comparison,
    Maps,
    agreement_gain,
    checked_index,
    checked_maps,
    largest_plausible_share,
    mean_agreement,
    mean_fragments,
)

# Dice that a candidate may be expected to lose, by the bound.
TOLERANCE = 0.01
# By how much a target may be farther from the federation's size than the parent's: 5 %, as tanh(2 ln 1.05).
AWAY = 0.1
# How far from all that was practised a hospital may be, in standard deviations over the episodes.
BEYOND = 2.0
# Shift over the largest that was practised, and share of the practised episodes that may lose a point.
MOST_SHIFT = 2.0
MOST_LOST = 0.1
# Shift with the candidate's statistics over that with the parent's.
MOST_LEFT = 1.0
# How many times nearer scans may be in negative.
NEGATIVE = 2.0
# Share of all pixels, added to sizes before they are divided, so that 0 / 0 counts as no change.
EPS = 1e-4


@dataclass(frozen=True)
class Targets:
    """What the targets of the federation's members look like, at the network's resolution; 0 is unknown.

    Attributes:
        share: of all pixels that are a target.
        largest: share of a patient's pixels that are a target, where it is large.
        pieces: connected pieces per slice and foreground class, over those that are there.
    """

    share: float = 0.0
    largest: float = 0.0
    pieces: float = 0.0


UNKNOWN_TARGETS = Targets()


@dataclass(frozen=True)
class Prediction:
    """What the federation's playbook expects of a candidate at this hospital.

    Attributes:
        change: of Dice.
        bound: its lower bound.
        size_gain: how much nearer than the parent's the target is to the federation's size (`Features`).
        beyond: by how many standard deviations the feature that is farthest out is outside the range of
            practice; 0 within.
        smaller: share of the smaller doses of the same recipe that are accepted; 1 without one.
    """

    change: float
    bound: float
    size_gain: float
    beyond: float
    smaller: float = 1.0

    @property
    def accepted(self) -> bool:
        """Whether it passes the checks of `PRACTISED` that rest on it."""
        return (
            self.change > 0
            and self.bound >= -TOLERANCE
            and self.size_gain >= -AWAY
            and self.beyond <= BEYOND
            and self.smaller == 1
        )


@dataclass(frozen=True)
class Shifted:
    """What is known of a dose by shift at this hospital, beside its masks.

    Attributes:
        beyond: its shift over the largest that the members, or else phantoms, practised.
        lost: share of the members' episodes in which that dose, served by this gate, lost more than a point;
            None: they did not practise it, or the dose is 0 here.
        left: its shift under the candidate's statistics over that under the parent's.
        size_gain: how much nearer than the parent's the target is to the sizes that members have, give or
            take one standard deviation over them; None: those are unknown.
        negative: how many times farther the scans are than in negative; None: not measured.
        mistaken: share of the scans that no training scan resembles in kind (the guard's gross warnings).
        licensed: whether members practised it, or it changes nothing.
    """

    beyond: float
    lost: float | None
    left: float
    size_gain: float | None
    negative: float | None = None
    mistaken: float = 0.0
    licensed: bool = False


class Observed:
    """A candidate's masks on the hospital's scans, beside the masks that it is compared with.

    Legend: N slices, H rows, W columns, S scans.
    """

    def __init__(
        self,
        candidate: ArrayLike,
        parent: ArrayLike,
        replicas: Sequence[ArrayLike],
        scan_index: ArrayLike,
        classes: int,
        source_warnings: float,
        statistics_distance: float,
        references: Sequence[ArrayLike] = (),
        prediction: Prediction | None = None,
        targets: Targets = UNKNOWN_TARGETS,
        shifted: Shifted | None = None,
    ) -> None:
        """Check the class maps [N, H, W], and compare the candidate's with the parent's.

        Args:
            candidate: its masks.
            parent: the global model's masks of the same slices, whatever serves the hospital now.
            replicas: masks of the same adaptation from another seed, or from half of the scans.
            scan_index: which slices [N] belong to one scan; a patient's scans count as one where the
                patient is known.
            classes: how many there are, background included.
            source_warnings: share of the scans that do not look like those of training.
            statistics_distance: as the function of that name returns it.
            references: what the federation's models say together (`consensus`); none: not measured.
            prediction: what the federation's playbook expects; None: there is no playbook.
            targets: of the federation's members. A parent that finds next to nothing is no measure of size.
            shifted: of a dose by shift.

        Raises:
            LabelError: the maps differ in shape or hold values that are no classes.
        """
        self.candidate: Maps = checked_maps(candidate, "candidate", classes)
        self.parent: Maps = checked_maps(parent, "parent", classes, self.candidate)
        self.scan_index = checked_index(scan_index, len(self.candidate))
        self.replicas = [
            checked_maps(maps, f"replica {number}", classes, self.candidate)
            for number, maps in enumerate(replicas, start=1)
        ]
        self.references = [
            checked_maps(maps, f"reference {number}", classes, self.candidate)
            for number, maps in enumerate(references, start=1)
        ]
        self.classes = classes
        self.source_warnings = source_warnings
        self.statistics_distance = statistics_distance
        self.prediction = prediction
        self.targets = targets
        self.shifted = shifted
        self.comparison = Comparison.of(self.candidate, self.parent, self.scan_index, classes)

    @property
    def sizes(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Foreground of each scan [S] in slices' worth: the candidate's and the parent's."""
        return self.comparison.first[:, 1:].sum(axis=1), self.comparison.second[:, 1:].sum(axis=1)

    @property
    def slices(self) -> NDArray[np.float64]:
        """How many slices each scan has [S]."""
        counts: NDArray[np.float64] = self.comparison.first.sum(axis=1)
        return counts

    def agreement(self, maps: Maps) -> float:
        """Dice of the candidate's masks with these, as `mean_agreement` takes it."""
        return mean_agreement(self.candidate, maps, self.scan_index, self.classes, MIN_COMPONENT)


@check(
    "agreement",
    "at least",
    0.85,
    "Dice with the parent's masks, mean over the scans in which either finds anything",
    "Its masks differ too much from those of the version it started from.",
)
def agreement(observed: Observed) -> float:
    """Two people who outline the same tumours agree at a Dice of 0.74 to 0.85 (Menze et al., IEEE TMI 2015).

    Without labels a larger change than that between two people cannot be justified. On phantoms the limit
    costs nothing beside consensus_gain: candidates that pass that check have 0.94 or more. It was 0.7 until
    six candidates for one real site passed at 0.76 to 0.84, of which two were more than 2 points of Dice
    worse and four between 1 and 5 better. Its effect on real scans is untested.
    """
    return observed.agreement(observed.parent)


@check(
    "stability",
    "at least",
    0.8,
    "Dice with the masks of the same adaptation from another seed, or from half of the scans; the lowest",
    "With another seed, or with half of the scans, its masks differ too much.",
)
def stability(observed: Observed) -> float | None:
    """The middle of the range in which two people agree, since a replica from half of the scans has also
    seen less. Below it chance decides as much as a person does. Phantoms: 0.93.
    """
    return min((observed.agreement(replica) for replica in observed.replicas), default=None)


@check(
    "consensus_gain",
    "above",
    0.0,
    "how much more than the parent's the masks agree with those of the federation's models together: "
    "the lower bound (95 %) over scans, with training's statistics or these scans', the lower",
    "Its masks are not shown to be nearer to what the federation's models say together.",
)
def consensus_gain(observed: Observed) -> float | None:
    """A candidate must show that it is nearer than its parent to what the federation says, by both kinds of
    statistics; a candidate without a change shows nothing.

    Of 124 phantom candidates that lost more than a point of Dice the other checks, with an agreement of 0.7,
    passed 91; with this check none passed. With a limit of -0.01 it would be 5, the worst of which lost 2.0.
    The price: 95 of 114 that gained are rejected, with -0.01 81. The limit was chosen on these candidates. Of
    15 and 7 others it passed none and rejected 5.
    """
    gains = [
        agreement_gain(
            observed.candidate,
            observed.parent,
            reference,
            observed.scan_index,
            observed.classes,
            MIN_COMPONENT,
        )
        for reference in observed.references
    ]
    return min((gain for gain in gains if gain is not None), default=None)


@check(
    "size_factor",
    "at most",
    2.0,
    "by how much the class that changed most grew or shrank over all scans",
    "A structure became far larger or smaller over all scans.",
)
def size_factor(observed: Observed) -> float:
    """A mask half or twice as large has a Dice of at most 0.67, so agreement would reject it too. This check
    names the cause, for each class over all scans together.

    Where the parent fails, what finds the target again is many times larger. So where the members' size is
    known, all classes together may have any size between the parent's and the members', and beyond these the
    nearer counts; a single class may then grow. `size_gain` refuses a target that moves away from the
    members'.
    """
    counts = observed.comparison.counts.sum(axis=0)
    now = counts.sum(axis=1)[1:] / counts.sum() + EPS
    before = counts.sum(axis=0)[1:] / counts.sum() + EPS
    if not observed.targets.share:
        return float(np.maximum(now / before, before / now).max())
    low, high = sorted((float(before.sum()), observed.targets.share + EPS))
    whole = max(low / float(now.sum()), float(now.sum()) / high, 1.0)
    return whole if len(now) == 1 else max(whole, float((before / now).max()))


@check(
    "emptied",
    "at most",
    0.2,
    "share of the scans in which the parent finds something and the candidate nothing",
    "It finds nothing in scans in which the version before found something.",
)
def lost_target_rate(observed: Observed) -> float:
    """The parent's false alarms may disappear; a target that disappears in one scan of five is lost."""
    own, before = observed.sizes
    return float(np.mean((before >= MIN_COMPONENT) & (own < MIN_COMPONENT)))


@check(
    "giant",
    "at most",
    0.1,
    "share of the scans with a mask far beyond the largest of the parent and of the members' targets",
    "Some of its masks are far beyond the largest of before.",
)
def oversized_rate(observed: Observed) -> float:
    """One scan of ten may be unusual, but no anatomy doubles."""
    own, before = observed.sizes
    largest = max(float((before / observed.slices).max()), observed.targets.largest)
    return float(np.mean(own / observed.slices > largest_plausible_share(largest)))


@check(
    "fragments",
    "at most",
    2.0,
    "pieces per mask, plus one, over those of the parent or of the members' targets, plus one",
    "Its masks fall apart into more pieces.",
)
def fragments(observed: Observed) -> float:
    """Up to twice as many pieces, and one more; noise makes hundreds."""
    found, before = (mean_fragments(maps, observed.classes) for maps in (observed.candidate, observed.parent))
    return (found + 1) / (max(before, observed.targets.pieces) + 1)


@check(
    "source_warnings",
    "at most",
    0.5,
    "share of the scans that do not look like those of training",
    "Too many scans do not look like those of training.",
)
def source_warnings(observed: Observed) -> float:
    """Where most scans do not look like training's, the other checks say little."""
    return observed.source_warnings


@check(
    "statistics_distance",
    "at most",
    0.06,
    "how far the layers' statistics on these scans are from training's (0 equal, 1 nothing in common)",
    "These scans are too far from those of training.",
)
def statistics_distance(observed: Observed) -> float:
    """Four times the distance of a good candidate at the outside phantom hospital (0.016; members 0.003).
    Pure noise has 0.03, networks wrecked by a high rate have 0.07 and more.
    """
    return observed.statistics_distance


@check(
    "predicted_gain",
    "above",
    0.0,
    "the change of Dice that the federation's practice predicts from these scans, without their masks",
    "No gain is expected from what the member hospitals saw.",
)
def predicted_gain(observed: Observed) -> float | None:
    """Where no gain is expected the global model stays."""
    return None if observed.prediction is None else observed.prediction.change


@check(
    "gain_bound",
    "at least",
    -TOLERANCE,
    "the lower bound of that prediction: of K + 1 hospitals like the K members about one does worse",
    "From what the member hospitals saw, a loss is too likely.",
)
def gain_bound(observed: Observed) -> float | None:
    """A point of Dice is what members' own scanners make a model vary by; more is harm."""
    return None if observed.prediction is None else observed.prediction.bound


@check(
    "size_gain",
    "at least",
    -AWAY,
    "how much nearer the target is than the parent's to the size that the federation's members know",
    "What it finds moved away from the size that the member hospitals know.",
)
def size_gain(observed: Observed) -> float | None:
    """In practice on phantoms most candidates that lost moved the target away from the members' size. It also
    refuses a hospital with other targets than the members', which is safe. The size of a shift does not tell
    its sign, so that a dose by shift has this veto too. Where the members' own targets differ in size, what
    differs no more is no sign: vessels of three cameras vary by a third, and a twentieth more of them is no
    harm.
    """
    if observed.shifted is not None:
        return observed.shifted.size_gain
    return None if observed.prediction is None else observed.prediction.size_gain


@check(
    "beyond_practice",
    "at most",
    BEYOND,
    "how far these scans are from all that the federation practised, in its standard deviations",
    "These scans are unlike all that the member hospitals practised on.",
)
def beyond_practice(observed: Observed) -> float | None:
    """A prediction beyond what was practised rests on nothing. On phantoms, left out in turn and behind drawn
    scanners, the farthest was 0.9 with seven members and 1.9 with three. Swapped black and white was 2.7 and
    more.
    """
    return None if observed.prediction is None else observed.prediction.beyond


@check(
    "smaller_doses",
    "at least",
    1.0,
    "share of the smaller doses of the same recipe that pass these checks",
    "A smaller change of the same kind was rejected.",
)
def smaller_doses(observed: Observed) -> float | None:
    """A larger dose is trusted only after every smaller one (fixed-sequence testing). On phantoms this
    refused one harm in four, and no gain that a smaller dose did not have.
    """
    return None if observed.prediction is None else observed.prediction.smaller


@check(
    "shift_beyond_practice",
    "at most",
    MOST_SHIFT,
    "the shift of these scans over the largest that the federation's members practised",
    "These scans are farther from the members' than all that they practised on.",
)
def shift_beyond_practice(observed: Observed) -> float | None:
    """Cohorts of noise have ten times the shift of real ones. It is no guard of the modality: inverted scans
    have less shift than scans behind the strongest scanner.
    """
    return None if observed.shifted is None else observed.shifted.beyond


@check(
    "shift_left",
    "at most",
    MOST_LEFT,
    "the shift that is left of these scans with the candidate's statistics, over that with the parent's",
    "With its statistics the scans are not nearer to what the network expects.",
)
def shift_left(observed: Observed) -> float | None:
    """A dose of the scans' own statistics moves the network towards them, so less shift is left. Statistics
    of anything else move it away.
    """
    return None if observed.shifted is None else observed.shifted.left


@check(
    "negative",
    "at most",
    NEGATIVE,
    "how many times farther these scans are from the members' than they are in negative",
    "These scans look inverted: bright where the members' are dark.",
)
def negative(observed: Observed) -> float | None:
    """At most 1.8 of 160 cohorts of phantoms, as they are and behind drawn scanners. Inverted, 132 of them
    are above the limit, 12 are too near to be looked at, and 16 pass, most behind a scanner of severity 3.
    """
    return None if observed.shifted is None else observed.shifted.negative


@check(
    "mistaken",
    "at most",
    0.5,
    "share of the scans that no training scan resembles in kind",
    "Most of these scans are of another kind than those of training.",
)
def mistaken(observed: Observed) -> float | None:
    """Another modality can be nearer to the members than a strong scanner. That many scans only look unlike
    says little: behind a scanner of severity 3 nearly all do.
    """
    return None if observed.shifted is None else observed.shifted.mistaken


@check(
    "practice_lost",
    "at most",
    MOST_LOST,
    "share of the members' episodes in which this recipe, as it is served, lost more than a point",
    "At the member hospitals this recipe lost too often.",
)
def practice_lost(observed: Observed) -> float | None:
    """The members' licence: one scanner in ten may be one that no statistics cure."""
    return None if observed.shifted is None else observed.shifted.lost


@check(
    "practised",
    "at least",
    1.0,
    "whether the members practised this recipe, or it changes nothing (1), or not (0)",
    "No member hospital practised this, which harms classifiers more often than it helps.",
)
def practised(observed: Observed) -> float | None:
    """At three centres of colonoscopy the dose lost 5.6 points of balanced accuracy, and 19 at one of them
    with every other check passed: statistics of images tell classes apart as well as scanners.
    """
    return None if observed.shifted is None else float(observed.shifted.licensed)


@check(
    "class_lost",
    "at most",
    3.0,
    "by how much the class shrank that lost most of the scans that the version before gave it",
    "It hardly gives a class any more that the version before gave.",
)
def class_lost(observed: Observed) -> float:
    """Statistics of scans of mostly one class pull all answers to one class. One scan more on both sides, so
    that a class of a few scans is no measure.

    The limit is the collapse of a mask (`SafetyLimits`). A class may grow: a parent that fails gives one
    class alone.
    """
    counts = observed.comparison.counts.sum(axis=0)
    return float(((counts.sum(axis=0) + 1) / (counts.sum(axis=1) + 1)).max())


# A dose that the service computed in closed form: veto, cap and licence, and what detects a collapse.
BY_SHIFT: tuple[Check[Observed], ...] = (
    size_gain,
    shift_left,
    shift_beyond_practice,
    negative,
    mistaken,
    practice_lost,
    size_factor,
    lost_target_rate,
    oversized_rate,
    fragments,
)

# For a classification: what needs no masks, a licence, and classes that are lost.
BY_SHIFT_WITHOUT_MASKS: tuple[Check[Observed], ...] = (
    shift_left,
    shift_beyond_practice,
    negative,
    mistaken,
    practised,
    practice_lost,
    class_lost,
)

# With a playbook: what practice predicts, and the checks that detect a collapse that no practice had.
PRACTISED: tuple[Check[Observed], ...] = (
    predicted_gain,
    gain_bound,
    size_gain,
    beyond_practice,
    smaller_doses,
    size_factor,
    lost_target_rate,
    oversized_rate,
    fragments,
    statistics_distance,
)

ROUTING: tuple[Check[Observed], ...] = (
    agreement,
    stability,
    consensus_gain,
    size_factor,
    lost_target_rate,
    oversized_rate,
    fragments,
    source_warnings,
    statistics_distance,
)
