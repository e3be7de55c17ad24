"""Arms without routing, with batch norm's statistics baked as in a merged network.

`arms` reports averages, the ensemble and Tent with the statistics of the reported batches, as their authors
do. A hospital's model gets its statistics before the next scan arrives, so here they are taken from the scans
that are learned from.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.accuracy.outside.arms import Arms, HeldOutHospital, Models, baked, norms_of, rounded, tent
from benchmarks.harness.evaluation import Scans, predict


def baked_arms(models: Models, hospital: HeldOutHospital, epochs: int, seed: int) -> dict[str, Any]:
    """A cell's result: each arm learned on all patients, and on one half to report the other."""
    inductive: Arms = {}
    for turn in hospital.turns():
        for arm, dice in _arms(models, turn.learned, turn.reported, epochs, seed).items():
            inductive.setdefault(arm, {}).update(dice)
    whole = hospital.whole()
    transductive = _arms(models, whole.learned, whole.reported, epochs, seed)
    return {"dice": {"transductive": rounded(transductive), "inductive": rounded(inductive)}}


def _arms(models: Models, learned: Scans, reported: Scans, epochs: int, seed: int) -> Arms:
    singles = [baked(models, models.network(name), learned, name) for name in models.states]
    together = torch.stack([predict(network, reported.images) for network in singles]).mean(dim=0)
    tented = dict(norms_of(tent(models, learned, epochs, seed).network))
    sure = models.network()
    for name, norm in norms_of(sure):
        norm.load_state_dict(tented[name].state_dict(), strict=False)
    networks = {"average": models.average(), "uniform": models.uniform(), "tent": sure}
    return {"ensemble (baked)": reported.dice(together)} | {
        f"{name} (baked)": reported.dice(predict(baked(models, network, learned), reported.images))
        for name, network in networks.items()
    }
