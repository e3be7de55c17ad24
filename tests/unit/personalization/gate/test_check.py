"""Checks of all gates at their limits, and verdicts as they are recorded in recorded_verdicts.json."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

import numpy as np
import pytest
from torch import nn

import personalization
from personalization.fedoap.joining import JOINING, Joining, JoiningEpoch, ObservedJoining
from personalization.gate import (
    BY_LENS,
    BY_LENS_WITHOUT_MASKS,
    BY_SHIFT,
    BY_SHIFT_WITHOUT_MASKS,
    ROUTING,
    SHOWS,
    Check,
    ObservedClasses,
    ObservedClassesThroughLens,
    ObservedDose,
    ObservedLens,
    ObservedRouting,
    ObservedScans,
    Shifted,
    Targets,
    ThroughLens,
    judge,
    limits,
)
from personalization.gate.picking import PICKING, Pick
from personalization.masks import BY_MASKS, Fitted, FoldScores, ObservedFit

RECORDED = json.loads(Path(__file__).with_name("recorded_verdicts.json").read_text(encoding="utf-8"))
GATES: dict[str, tuple[Check[Any], ...]] = {
    "dose": BY_SHIFT,
    "dose, classes": BY_SHIFT_WITHOUT_MASKS,
    "lens": BY_LENS,
    "lens, classes": BY_LENS_WITHOUT_MASKS,
    "dose beside a lens": SHOWS,
    "routing": ROUTING,
    "joining": JOINING,
    "picking": PICKING,
    "masks": BY_MASKS,
}
EVERY_CHECK = [
    pytest.param(gate, check, id=f"{name} {check.name}") for name, gate in GATES.items() for check in gate
]


def test_every_gate_of_the_code_is_tested_here_and_has_a_recorded_verdict() -> None:
    modules = [
        import_module(each.name) for each in walk_packages(personalization.__path__, "personalization.")
    ]
    found = {
        tuple(check.name for check in value): (module.__name__, name)
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, tuple) and value and all(isinstance(each, Check) for each in value)
    }
    assert found
    tested = {tuple(check.name for check in gate) for gate in GATES.values()}
    assert tested == found.keys(), found
    recorded = {tuple(check["name"] for check in verdict["checks"]) for verdict in RECORDED.values()}
    assert recorded == tested


@pytest.mark.parametrize(("gate", "check"), EVERY_CHECK)
def test_each_check_alone_decides_at_its_limit(gate: tuple[Check[Any], ...], check: Check[Any]) -> None:
    def failed(value: float | None) -> set[str]:
        """The names that fail where this check has `value` and no other is measured."""
        values = {own.name: value if own is check else None for own in gate}
        fixed = [replace(own, measure=lambda given, name=own.name: given[name]) for own in gate]
        verdict = judge(fixed, values)
        assert verdict.passed == all(result.passed for result in verdict.checks)
        return {result.name for result in verdict.checks if not result.passed}

    worse = 1e-9 if check.bound == "at most" else -1e-9
    assert failed(check.limit - worse) == set()
    assert failed(check.limit) == ({check.name} if check.bound == "above" else set())
    assert failed(check.limit + worse) == failed(math.nan) == {check.name}
    assert failed(None) == set()


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_names_are_unique_and_every_limit_has_its_reason(gate: tuple[Check[Any], ...]) -> None:
    assert [*limits(gate).items()] == [(check.name, check.limit) for check in gate]
    assert all(check.reason.endswith(".") and check.sentence for check in gate)
    assert all(check.failure.endswith(".") for check in gate)


def routing_case() -> dict[str, Any]:
    """12 slices of 5 scans in 3 classes: a candidate near its parent, one replica near it, one far away."""
    draw = np.random.default_rng(7)
    y, x = np.mgrid[:24, :24]
    parent = np.zeros((12, 24, 24), np.uint8)
    for one, (row, column) in zip(parent, draw.integers(6, 18, (12, 2)), strict=True):
        one[(y - row) ** 2 + (x - column) ** 2 < 25] = 1
        one[(y - row) ** 2 + (x - column) ** 2 < 5] = 2

    def changed(share: float) -> np.ndarray:
        noisy = parent.copy()
        where = draw.random(parent.shape) < share
        noisy[where] = draw.integers(0, 3, int(where.sum()))
        return noisy

    return {
        "candidate": changed(0.02),
        "parent": parent,
        "replicas": [changed(0.03), changed(0.3)],
        "scan_index": [0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 4, 4],
        "classes": 3,
        "source_warnings": 0.25,
        "statistics_distance": 0.0125,
        "references": (changed(0.05), changed(0.1)),
    }


SHIFTED = Shifted(beyond=0.5, left=0.25, lost=0.0625, negative=1.5, mistaken=0.125)
MISTAKEN = Shifted(beyond=3.0, left=1.5, lost=0.25, negative=4.0, mistaken=1.0)


def dose_case(candidate: np.ndarray, shifted: Shifted, size_gain: float | None) -> ObservedDose:
    case = routing_case()
    targets = Targets(0.01, 0.25, 1.5)
    return ObservedDose(candidate, case["parent"], case["scan_index"], 3, targets, shifted, size_gain)


def classes_case(shifted: Shifted, *, licensed: bool) -> ObservedClasses:
    return ObservedClasses([0, 0, 1, 2, 2, 2], [0, 1, 1, 1, 1, 2], 3, shifted, licensed=licensed)


LENS = ThroughLens(left=0.25, licence=0.5, grid=0.75, sides=8.0)
USELESS = ThroughLens(left=1.5, licence=0.75, grid=0.125, sides=1.0, negated=True)


def lens_case(candidate: np.ndarray, lens: ThroughLens, shifted: Shifted) -> ObservedLens:
    case = routing_case()
    targets = Targets(0.01, 0.25, 1.5)
    return ObservedLens(candidate, case["parent"], case["scan_index"], 3, targets, 0.25, lens, shifted)


def classes_through_lens(lens: ThroughLens, shifted: Shifted) -> ObservedClassesThroughLens:
    classes = [0, 0, 1, 2, 2, 2], [0, 1, 1, 1, 1, 2], 3
    return ObservedClassesThroughLens(*classes, lens, shifted, licensed=False)


def joining_case() -> ObservedJoining:
    case = routing_case()
    drawn, found = (np.asarray(maps > 0, np.uint8) for maps in (case["parent"], case["replicas"][0]))
    epochs = JoiningEpoch(0, None, 0.2, 1.0), JoiningEpoch(1, 0.5, 0.8, 0.25)
    return ObservedJoining(Joining(epochs, 1), beside_drawn(found, drawn, case["scan_index"]))


def masks_case() -> ObservedFit:
    case = routing_case()
    scores = {"a": (0.5, 0.55, 0.7), "b": (0.6, 0.62, 0.64), "c": (0.4, 0.5, 0.52)}
    fitted = Fitted(nn.Identity(), (0.0, 0.5, 1.0), 1.0, 60, (FoldScores(0.2, scores),))
    return ObservedFit(fitted, beside_drawn(case["candidate"], case["parent"], case["scan_index"]), 3)


def beside_drawn(
    found: np.ndarray, drawn: np.ndarray, scan_index: Sequence[int]
) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """Whole scans [H, W, slices], of which the first three are drawn on."""
    index = np.asarray(scan_index)
    scans = []
    for scan in range(index.max() + 1):
        own, truth = (np.moveaxis(np.asarray(maps)[index == scan], 0, -1) for maps in (found, drawn))
        scans.append((own, truth if scan < 3 else None))
    return scans


def test_verdicts_are_the_recorded_json() -> None:
    """Names, order, bounds, limits and sentences are part of the API; values agree to 12 digits."""
    case = routing_case()
    lost = {**case, "candidate": np.asarray(case["parent"] == 2, np.uint8)}
    unmeasured = {**case, "replicas": [], "references": ()}
    pick = Pick("1", {"information": {"1": -0.04}, "statistics": {"1": 0.01}}, None, 0.25)
    verdicts = {
        "dose": judge(BY_SHIFT, dose_case(case["candidate"], SHIFTED, 0.05)),
        "dose, not measured": judge(BY_SHIFT, dose_case(case["candidate"], Shifted(1.0, 1.0), None)),
        "dose, bad": judge(BY_SHIFT, dose_case(lost["candidate"], MISTAKEN, -0.5)),
        "dose, classes": judge(BY_SHIFT_WITHOUT_MASKS, classes_case(SHIFTED, licensed=True)),
        "dose, classes, bad": judge(BY_SHIFT_WITHOUT_MASKS, classes_case(MISTAKEN, licensed=False)),
        "lens": judge(BY_LENS, lens_case(case["candidate"], LENS, SHIFTED)),
        "lens, bad": judge(BY_LENS, lens_case(lost["candidate"], USELESS, MISTAKEN)),
        "lens, classes": judge(BY_LENS_WITHOUT_MASKS, classes_through_lens(LENS, SHIFTED)),
        "dose beside a lens": judge(SHOWS, ObservedScans(USELESS)),
        "routing": judge(ROUTING, ObservedRouting(**case)),
        "routing, not measured": judge(ROUTING, ObservedRouting(**unmeasured)),
        "routing, bad": judge(ROUTING, ObservedRouting(**lost)),
        "joining": judge(JOINING, joining_case()),
        "picking": judge(PICKING, pick),
        "masks": judge(BY_MASKS, masks_case()),
    }
    found = json.loads(json.dumps({name: verdict.to_json() for name, verdict in verdicts.items()}))
    assert found.keys() == RECORDED.keys()
    for name, verdict in found.items():
        assert verdict["passed"] == RECORDED[name]["passed"]
        for result, recorded in zip(verdict["checks"], RECORDED[name]["checks"], strict=True):
            assert [*result] == [*recorded]
            if recorded["value"] is not None:
                # Quantiles of Student's t differ by version of scipy in the last digits
                recorded["value"] = pytest.approx(recorded["value"], rel=1e-12, abs=1e-12)
            assert result == recorded
