"""The line of a scan that was segmented, with its warnings, and the lines of a job."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import pytest
from rich.text import Text

from locum.answers import Job
from locum.commands.batch import Found, _Done, _volumes
from locum.commands.fitting import lines_of, model_line
from locum.commands.terminal import in_flags
from locum.reading import read

WARNINGS = ("zero-shot: Do not rely on this mask.", "guard: far [from] training", "files-ignored: 2 of 9")


@pytest.mark.parametrize("count", range(4))
def test_scan_has_one_line_and_each_of_several_warnings_a_line_below(count: int) -> None:
    report: Any = Namespace(
        labels={"organ": Namespace(voxels=9, volume_ml=1.5)},
        receipt=Namespace(network=Namespace(name="organ@1")),
        warnings=WARNINGS[:count],
    )
    line, *below = Text.from_markup(_volumes(_Done(Found(Path("a.nii"), "a.nii"), report))).plain.split("\n")
    assert line.startswith("✓ a.nii  organ 1.50 mL  organ@1")
    said = [f"warning: {each}" for each in WARNINGS[:count]]
    assert below == ([f"    {each}" for each in said] if count > 1 else [])
    assert line.endswith(f"  {said[0]}" if count == 1 else "organ@1")


def job(**changed: Any) -> Job:
    check = {"name": "negative", "passed": False, "value": 6.4, "bound": "at most", "limit": 2}
    checks = [check | {"failure": "These scans look inverted."}]
    checks += [
        {**check, "name": "emptied", "passed": True, "value": None},
        {**check, "name": "size", "passed": True},
    ]
    figures = {
        "title": "What it cost",
        "tone": "plain",
        "sentences": ["Seconds."],
        "reasons": [],
        "body": None,
    }
    said = {
        **{"title": "The new version did not pass its checks", "tone": "bad", "body": {"form": "checks"}},
        **{
            "sentences": ["Only an override makes it answer.", "It is far."],
            "reasons": ["They look inverted."],
        },
    }
    body = {
        **{"id": "j", "kind": "adaptation", "state": "succeeded", "hospital": "dune", "model": "organ"},
        **{"attempt": 1, "queue_position": None, "progress": {}, "reason": None, "cohort": "c"},
        **{"created_at": "2026-01-01T00:00:00Z", "started_at": None, "finished_at": None, "options": {}},
        **{"warnings": ["few scans"], "no_worker": None, "gate": {"passed": False, "checks": checks}},
        "candidate": {"reference": "organ.at-dune@1", "name": "organ.at-dune", "version": 1, "digest": "d"},
        "status": {"words": "Candidate rejected", "sentence": "Finished.", "doing": None, "tone": "bad"},
        "sections": [figures, said],
    }
    return read(Job, body | changed)


def test_job_is_told_by_the_service_s_sentences_and_then_by_figures() -> None:
    assert list(lines_of(job())) == [
        "job j (adaptation, organ, dune): Candidate rejected",
        "  The new version did not pass its checks.",
        "  Only an override makes it answer.",
        "  It is far.",
        "  - They look inverted.",
        "  warning: few scans",
        "  ✗ negative  6.400 (at most 2)",
        "  · emptied  not measured",
        "  ✓ size  6.400 (at most 2)",
        "candidate organ.at-dune@1 did not pass its gate",
        "  try it:    locum segment SCANS --model organ.at-dune@1",
    ]
    waits = {
        "words": "Running",
        "sentence": "Under way.",
        "doing": "adapting, epoch 1 of 5",
        "tone": "accent",
    }
    running = job(state="running", status=waits, sections=[], warnings=[], gate=None, candidate=None)
    assert list(lines_of(running)) == [
        "job j (adaptation, organ, dune): Running",
        "  adapting, epoch 1 of 5",
    ]


def test_dice_is_told_in_percent_and_its_changes_in_points() -> None:
    known = {"passed": True, "failure": "", "bound": "at least"}
    checks = [
        {
            **known,
            "name": "gain",
            "value": 0.058,
            "limit": 0.01,
            "meaning": "change of Dice against the parent",
        },
        {
            **known,
            "name": "agreement",
            "value": 0.9154,
            "limit": 0.85,
            "meaning": "Dice with the parent's masks",
        },
    ]
    lines = list(lines_of(job(gate={"passed": True, "checks": checks})))
    assert "  ✓ gain  +5.8 points (at least +1)" in lines
    assert "  ✓ agreement  91.5 % (at least 85 %)" in lines


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("To assign it all the same, say override=true: it is recorded", "the same, say --override: it is"),
        ("Send another scan, or guard=warn to have it answered", "or --guard warn to have"),
        ("option unlike=include has all scans used", "--option unlike=include has all"),
        ("choose one by the option `series`, or send", "choose one by --series, or send"),
        ("answers it (POST /hospitals/dune/watch/MODEL/answers); a", "(`locum watch answer dune MODEL`); a"),
        ("a link ?site=aster stays", "a link ?site=aster stays"),
    ],
)
def test_sentences_of_the_service_name_the_commands_flags(said: str, told: str) -> None:
    assert told in in_flags(said)


def test_job_of_an_earlier_service_has_its_state_and_the_sentence_of_each_failed_check() -> None:
    lines = list(lines_of(job(sections=[], status=None)))
    assert lines[0] == "job j (adaptation, organ, dune): succeeded"
    assert lines[2:4] == ["  ✗ negative  6.400 (at most 2)", "    These scans look inverted."]


def test_model_that_does_not_answer_says_why_in_place_of_what_it_answers() -> None:
    given: Any = Namespace(
        name="phantom", latest=None, kind="model", answers="/segment", summary="One network.", untrusted=False
    )
    assert model_line(given) == "model phantom  withdrawn: no version of it answers"
    given.untrusted = True
    assert model_line(given) == "model phantom  not signed by a trusted key: no version of it answers"
    given.latest = Namespace(version=3)
    assert model_line(given) == (
        "model phantom@3  model, /segment: One network. (no trusted key signed its newest version)"
    )
    given.untrusted = False
    assert model_line(given) == "model phantom@3  model, /segment: One network."
