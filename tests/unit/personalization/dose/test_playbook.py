"""The record of the members' practice, and files of the format before it."""

from __future__ import annotations

import json

import pytest

from personalization.dose import Episode, Playbook
from personalization.gate import Targets

TARGETS = Targets(0.1, 0.2, 1.5)
MEMBERS = {
    "b": [Episode(0.0, 0.01, 1.5), Episode(2.0, 0.05, 9.0)],
    "a": [Episode(0.0, -0.02, 2.0), Episode(2.0, 0.0, 7.0), Episode(1.0, -0.01, 0.5)],
    "away": [],
}


def test_a_playbook_is_what_the_members_episodes_come_to() -> None:
    found = Playbook.of(MEMBERS, TARGETS)
    assert (found.members, found.severities, found.targets) == (("a", "b"), (0.0, 1.0, 2.0), TARGETS)
    record = found.by_shift
    assert record is not None
    # Members count alike, however many episodes they have; a loss of exactly a point is none.
    assert record.mean == pytest.approx((-0.01 + 0.03) / 2)
    assert (record.episodes, record.worst, record.lost, record.largest) == (5, -0.02, 0.2, 9.0)
    assert record.members == {
        "a": (pytest.approx(-0.01), -0.02, 0.0),
        "b": (pytest.approx(0.03), 0.01, 0.05),
    }
    assert Playbook.model_validate_json(found.to_bytes()) == found
    assert json.loads(found.to_bytes())["format"] == "locum-playbook/2"


def test_a_playbook_needs_two_members() -> None:
    with pytest.raises(ValueError, match=r"at least two members, found those of \['b'\]"):
        Playbook.of({"a": [], "b": MEMBERS["b"]}, TARGETS)


@pytest.mark.parametrize("practised", [True, False])
def test_a_file_with_recipes_is_read_without_them(practised: bool) -> None:
    record = {
        **{"episodes": 24, "mean": 0.01, "worst": -0.02, "lost": 0.05, "largest": 12.5},
        "members": {"a": [0.01, -0.02, 0.03], "b": [0.01, 0.0, 0.02]},
    }
    recipe = {"name": "ladder, half", "options": {"preset": "ladder"}, "gate": {"features": ["early"]}}
    earlier = {
        **{"format": "locum-playbook/1", "members": ["a", "b"], "episodes": 12, "severities": [0, 1]},
        **{"recipes": [recipe], "targets": {"share": 0.1, "largest": 0.2, "pieces": 1.5}},
        "by_shift": record if practised else None,
    }
    found = Playbook.model_validate_json(json.dumps(earlier))
    assert found.targets == TARGETS
    assert (found.by_shift is not None) == practised
    if found.by_shift is not None:
        assert (found.by_shift.largest, found.by_shift.lost) == (12.5, 0.05)
