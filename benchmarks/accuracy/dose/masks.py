"""The part `masks`: what masks of 1, 5, 10 or 20 patients are worth at a hospital from outside.

The patients are drawn once per hospital and seed. Those behind the largest number of masks are scored, for
every number, so that no label that is used is ever scored and numbers can be compared. A hospital with fewer
patients has fewer numbers: a third of its patients, and three at least, are always scored.

Legend: N slices.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.accuracy.outside.hospital import arms_of, change_of, dice_of, short, some_of
from benchmarks.accuracy.outside.scanner import ShiftedScanner
from benchmarks.harness.cells import Row
from benchmarks.harness.evaluation import Scans
from benchmarks.harness.tables import table
from model_store.preprocessing import prepare, prepare_mask
from personalization.labelled_slices import LabelledSlices
from personalization.masks import MasksConfig, fit
from personalization.masks.fine_tuning import between, tune
from personalization.options.masks import Trained
from training.data.cases import Case, Federation
from training.data.scan_files import mask_of, read_scan

COUNTS = (1, 5, 10, 20)
LADDER = (0, 3)
# Always served, at the number of masks that the preset's comparison is about.
BASELINES: tuple[Trained, ...] = ("head", "norms", "ssf", "scratch")
COMPARED = 5
FEWEST_SCORED = 3


@dataclass(frozen=True)
class MaskedHospital:
    """All scans of a hospital; the targets uint8 [N, H, W] of their slices, as the network sees them."""

    scans: Scans
    targets: Tensor

    @classmethod
    def load(
        cls, cases: Sequence[Case], federation: Federation, site: str, seed: int, severity: int
    ) -> MaskedHospital:
        """Read them, through the hospital's scanner at this severity."""
        task, change = federation.task, ShiftedScanner.of(site, seed).at(severity)
        targets = []
        for case in cases:
            scan = read_scan(case.image)
            prepared = prepare(change(scan) if change else scan, task)
            targets.append(torch.tensor(prepare_mask(mask_of(case), task, prepared.geometry)))
        return cls(Scans.load(cases, task, change), torch.cat(targets))

    def of(self, patients: Sequence[str]) -> LabelledSlices:
        """The slices with masks of these patients."""
        names = [scan.patient for scan in self.scans.scans for _ in range(scan.slices)]
        kept = [index for index, name in enumerate(names) if name in set(patients)]
        own = tuple(names[index] for index in kept)
        return LabelledSlices(self.scans.images[kept], self.targets[kept], own, self.scans.classes)


def split(
    patients: Sequence[str], seed: int, counts: Sequence[int] = COUNTS
) -> tuple[list[str], list[str], list[int]]:
    """The patients in the order of their masks, those who are scored, and the numbers of masks."""
    order = torch.randperm(len(patients), generator=torch.Generator().manual_seed(seed)).tolist()
    drawn = [sorted(patients)[index] for index in order]
    most = len(drawn) - max(FEWEST_SCORED, math.ceil(len(drawn) / 3))
    numbers = [count for count in counts if count <= most]
    largest = max(numbers, default=0)
    return drawn[:largest], drawn[largest:], numbers


def by_masks(
    network: nn.Module,
    federation: Federation,
    site: str,
    seed: int,
    severities: Sequence[int] = LADDER,
    counts: Sequence[int] = COUNTS,
) -> dict[str, Any]:
    """The change of Dice by severity and number of masks, of the preset and beside it.

    `network` is the global model of the others. Arms: `masks` the preset, `gated` what its gate serves by the
    held-out masks, `tuned` the fine-tuned network without a choice, and the baselines. One patient has no
    cross-validation: the preset refuses, and `half` is half of the fine-tuned weights.
    """
    cases = some_of(federation.site(site).cases)
    found = {}
    for severity in severities:
        hospital = MaskedHospital.load(cases, federation, site, seed, severity)
        order, scored, numbers = split(hospital.scans.patients, seed, counts)
        reported = hospital.scans.of(scored)
        before = dice_of(network, reported)
        at: dict[str, Any] = {}
        for count in numbers:
            examples, config = hospital.of(order[:count]), MasksConfig(seed=seed)
            arms, facts = {}, {}
            tuned, _ = tune(network, examples, config, config.steps_for(count), seed)
            arms["tuned"] = dice_of(between(network, tuned, 1.0, examples.images), reported)
            if len(examples.ill) < 2:
                arms["half"] = dice_of(between(network, tuned, 0.5, examples.images), reported)
            else:
                fitted = fit(network, examples, config, partial(_scored, hospital.scans))
                arms["masks"] = dice_of(fitted.network, reported)
                gain = fitted.gain
                passed = gain.mean >= 0.01 and gain.low >= 0
                arms["gated"] = arms["masks"] if passed else before
                facts = {
                    "weight": fitted.weight,
                    "held_out": [short(gain.mean), short(gain.low), gain.n],
                    "passed": passed,
                    "bound_holds": gain.low <= change_of(before, arms["masks"]),
                }
            if count == COMPARED:
                for trains in BASELINES:
                    other = MasksConfig(seed=seed, trains=trains)
                    state, _ = tune(network, examples, other, config.steps_for(count), seed)
                    arms[trains] = dice_of(between(network, state, 1.0, examples.images), reported)
            at[str(count)] = {"arms": arms_of(before, arms), **facts}
        found[str(severity)] = {"scored": len(scored), "masks": at}
    return {"at": found}


def _scored(scans: Scans, network: nn.Module, patients: Collection[str]) -> dict[str, float]:
    """Every patient's Dice; 1 where there is no target and none is found."""
    found = dice_of(network, scans.of(sorted(patients)))
    return {name: 1.0 if math.isnan(value) else value for name, value in found.items()}


def section(rows: Sequence[Row]) -> list[str]:
    """The part's section of the report: mean change, with the worst, by set, severity and masks."""
    lines: dict[tuple[str, str, int], dict[str, list[float]]] = {}
    for row in rows:
        for severity, at in row["result"]["at"].items():
            for count, each in at["masks"].items():
                own = lines.setdefault((row["cell"]["set"], severity, int(count)), {})
                for name, arm in each["arms"].items():
                    if isinstance(arm, list):
                        own.setdefault(name, []).append(100 * arm[0])
    if not lines:
        return []
    names = ("masks", "gated", "tuned", "half", *BASELINES)
    body = [
        [set_, severity, str(count), *(_words(own.get(name, [])) for name in names)]
        for (set_, severity, count), own in sorted(lines.items())
    ]
    head = ["set", "severity", "masks", *names]
    return [
        "## With masks of a few patients: minus the global model",
        "Mean over hospitals and seeds, in points of Dice, with the worst. No patient with a mask is scored.",
        table(head, body),
    ]


def _words(changes: Sequence[float]) -> str:
    return f"{sum(changes) / len(changes):+.1f} ({min(changes):+.1f})" if changes else ""
