"""The gate's thresholds, all of them, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Thresholds:
    """Set by reasoning and on phantoms; one of them, agreement, was raised knowing labels from outside.

    - agreement 0.85: two people who outline the same tumours agree at a Dice of 0.74 to 0.85 (Menze et al.,
      IEEE TMI 2015); a change as large as from one person to another is more than can be vouched for
      without labels. On phantoms it costs nothing beside consensus_gain: what that lets through has 0.94 and
      more. It was 0.7 until six candidates for one real site passed at 0.76 to 0.84, of which two were more
      than 2 points of Dice worse and four between 1 and 5 better: what it does for real scans is untested.
    - stability 0.8: the middle of that range, since a replica from half of the scans has also seen less.
      Where only chance differs and yet as much as between two people, chance decides. Phantoms: 0.93.
    - consensus_gain above 0: that the candidate is nearer than its parent to what the federation says, by
      either statistics, is to be shown and not to be assumed; no change shows nothing. Of 124 phantom
      candidates that lost more than a point of Dice the other checks, with an agreement of 0.7, let 91
      through, with this one none; with -0.01 it would be 5, the worst of which lost 2.0. The price: 95 of
      114 that gained are refused, with -0.01 81. Chosen on these; of 15 and 7 others, it let none through
      and refused 5.
    - size_factor 2: a mask half or twice as large has a Dice of 0.67 at most, so agreement would refuse it as
      well. This names the cause, and asks it of each class over all scans together.
    - emptied 0.2: a parent's false alarms may go; a target lost in one scan of five is a target lost.
    - giant 0.1: one scan of ten may be odd, but no anatomy doubles.
    - fragments 2: up to twice as many pieces, and one more; noise makes hundreds.
    - source_warnings 0.5: where most scans do not look like training's, nothing else here is worth much.
    - statistics_distance 0.06: four times that of a good candidate at the outside phantom hospital (0.016;
      members 0.003). Pure noise has 0.03, networks wrecked by a high rate 0.07 and more.
    """

    agreement: float = 0.85
    stability: float = 0.8
    consensus_gain: float = 0.0
    size_factor: float = 2.0
    emptied: float = 0.2
    giant: float = 0.1
    fragments: float = 2.0
    source_warnings: float = 0.5
    statistics_distance: float = 0.06


THRESHOLDS = Thresholds()
