"""Local-only: every site trains by itself, as FedAvg's sites do, and nothing is averaged.

The measure of what a federation is worth to a site: the same rounds, steps and schedule as in FedAvg, from a
draw of its own. A site validates its model at the start of every round and after the last, and keeps the best
one, or the last one (`selection: last`).

Shared:  once, summary statistics of the training scans, and the scores of the site's model on test and
         validation patients. In the phase `export`, and only at sites that consent: the site's model and its
         score.
Stays:   everything else.
"""

from __future__ import annotations

from typing_extensions import override

from training.choices.fedavg import FedAvgConfig
from training.methods.partly_shared import PersonalFedAvg
from training.methods.registry import register


@register("local-only", FedAvgConfig, kinds=("segmentation", "classification"))
class LocalOnly(PersonalFedAvg):
    """FedAvg of nothing: the whole network is the site's own."""

    @override
    def is_own(self, name: str) -> bool:
        return True
