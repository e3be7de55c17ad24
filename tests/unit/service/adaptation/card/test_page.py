"""The card as a page: what it says in each state, and that it says nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from typing import Any

import pytest

from service.adaptation.card.model import Card, Decision, Picture
from service.adaptation.card.page import heat_map, render
from service.adaptation.card.sections import epochs_section, gate_section
from service.database import Job
from service.jobs.sections import Section
from service.jobs.sections import heat_map as shares_of
from service.jobs.status import status
from service.jobs.views import CandidateView, JobView
from service.kinds import ADAPTABLE, Words

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
PNG = b"\x89PNG\r\n\x1a\nnot really"
ROUTING, JOINING, PICKING = (ADAPTABLE[name] for name in ("routing-space", "cross-attention", "clusters"))


def routed(layers: list[str], models: list[str], *values: list[float]) -> tuple[Section, ...]:
    coefficients = {"layers": layers, "models": models, "values": values}
    return ROUTING.sections({"coefficients": coefficients}, ())


COEFFICIENTS = shares_of(("encoder1", "head"), ("aster", "global"), ((0.75, 0.25), (1.0, 3.0)), "all layers")
ROUTED = routed(["encoder1", "head"], ["aster", "global"], [0.75, 0.25], [1.0, 3.0])
EPOCHS: list[dict[str, Any]] = [
    {"epoch": 0, "loss": 0.25, "entropy": 0.2, "shape": None, "foreground": 0.05, "agreement": 1.0},
    {"epoch": 1, "loss": 0.2, "entropy": 0.1, "shape": None, "foreground": 0.04, "agreement": 0.97},
    {
        **{"epoch": 2, "loss": None, "entropy": None, "shape": None, "foreground": 0.0, "agreement": 0.1},
        **{"safe": False, "reason": "the foreground is gone"},
    },
]


def checked(
    name: str, value: float | None, limit: float, bound: str, passed: bool, **more: str
) -> dict[str, Any]:
    return {"name": name, "value": value, "limit": limit, "bound": bound, "passed": passed, **more}


REFUSED = {
    "passed": False,
    "checks": [
        checked("agreement", 0.81, 0.5, "at least", True, meaning="as the parent"),
        checked("stability", None, 0.7, "at least", True, meaning="over halves"),
        checked("fragments", 7.3, 2, "at most", False, meaning="pieces", failure="Its masks fall apart."),
    ],
    "summary": ["A gain of 3.1 points is expected."],
}


def card(
    gate: dict[str, Any] | None = None,
    epochs: Sequence[dict[str, Any]] = (),
    more: tuple[Section, ...] = (),
    words: Words = ROUTING.words,
    best: int | None = None,
    **fields: Any,
) -> Card:
    """The card of a queued job with these of its own, or of the card's, fields."""
    known = set(Card.__dataclass_fields__)
    own = {name: fields.pop(name) for name in [*fields] if name in known and name != "model"}
    values: dict[str, Any] = {
        **{"id": "a" * 32, "kind": "adaptation", "state": "queued", "hospital": None, "model": "brain@2"},
        **{"attempt": 0, "progress": {}, "reason": None, "created_at": NOW, "started_at": None},
        **{"finished_at": None, "parent": "sha256:" + "b" * 64, "cohort": None, "options": {}},
        **{"warnings": [], **fields},
    }
    candidate = values.get("candidate")
    job = Job(
        **{name: values[name] for name in ("kind", "state", "progress")},
        candidate_name=candidate and candidate.name,
    )
    found = JobView(
        **values | {"candidate": candidate},
        status=status(job, None),
        queue_position=None,
        epochs=[*epochs],
        coefficients=None,
        gate=gate,
        result=None,
        sections=[gate_section(job, gate, words), *epochs_section(epochs, best, words), *more],
        no_worker=None,
        files_expire_at=NOW,
        request=None,
    )
    return Card(job=found, model=values["model"], words=words, best_epoch=best, **own)


FULL: dict[str, Any] = {
    "state": "succeeded",
    "hospital": "dune",
    "attempt": 2,
    "started_at": NOW,
    "finished_at": NOW + timedelta(seconds=3725),
    "candidate": CandidateView(
        reference="brain.at-dune@1", name="brain.at-dune", version=1, digest="sha256:" + "c" * 64
    ),
    "scans": 12,
    "images": 240,
    "best": 1,
    "epochs": EPOCHS,
    "more": ROUTED,
    "gate": REFUSED,
    "pictures": ((Picture("scan 1, before", PNG), Picture("scan 1, after", PNG + b"!")),),
    "warnings": ["scan 3 is brighter than training's"],
    "decisions": (Decision(3, NOW, "ada", "looked at all of them", True, True),),
    "options": {"preset": "paper", "epochs": 10, "routing_rate": None},
    "lineage": {"method": "iop-fl-routing", "sites": ("aster",)},
}


class Page(HTMLParser):
    """A page's elements and its visible text."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(content)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.texts.append(data)

    def close(self) -> None:
        super().close()
        assert self._open == []

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts))

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def full(**fields: Any) -> str:
    return render(card(**FULL | fields))


def bare(**fields: Any) -> Page:
    return Page(render(card(**fields)))


def test_card_shows_every_known_fact() -> None:
    shown = Page(full()).text
    for said in (
        "brain.at-dune@1",
        "For hospital dune",
        "not passed checks of the new version",
        "12 scans",
        "240 images",
        "1 h 2 min run time, 2 attempts",
        "fragments",
        "✗ failed",
        "✓ passed",
        "not measured",
        "Epoch 2 is not safe: the foreground is gone",
        "scan 3 is brighter than training's",
        "looked at all of them",
        "gate overridden",
        "in force",
        "serving since 2026-03-01 12:00:00 UTC",
        "sha256:" + "b" * 64,
        "sha256:" + "c" * 64,
        "iop-fl-routing",
        "research use only",
    ):
        assert said in shown


def test_render_of_the_same_card_is_deterministic() -> None:
    assert full() == full()


def test_card_page_refers_to_no_other_file() -> None:
    found = Page(full())
    assert found.named("script") == found.named("link") == found.named("iframe") == []
    references = [
        value
        for _, attributes in found.elements
        for name, value in attributes.items()
        if name in ("src", "href", "srcset", "data", "action")
    ]
    assert len(references) == 2
    assert all(
        reference is not None and reference.startswith("data:image/png;base64,") for reference in references
    )
    assert "url(" not in full()
    assert "http://" not in full()
    assert "https://" not in full()


HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;{{ 7*7 }}</title></style>"


def test_card_page_escapes_hostile_text() -> None:
    candidate = CandidateView(reference=HOSTILE, name=HOSTILE, version=1, digest=HOSTILE)
    found = Page(
        full(
            state="running",
            model=HOSTILE,
            hospital=HOSTILE,
            reason=HOSTILE,
            progress={"stage": HOSTILE, "why": HOSTILE},
            candidate=candidate,
            candidate_withdrawn=HOSTILE,
            warnings=[HOSTILE],
            epochs=[{"epoch": 0, "loss": 0.1, "safe": False, "reason": HOSTILE}, {"epoch": 1, "loss": 0.1}],
            more=routed([HOSTILE], [HOSTILE, "global"], [0.5, 0.5]),
            gate={
                "passed": False,
                "checks": [checked(HOSTILE, 1.0, 2.0, "at least", False, meaning=HOSTILE, failure=HOSTILE)],
                "summary": [HOSTILE],
            },
            pictures=((Picture(HOSTILE, PNG), Picture(HOSTILE, PNG)),),
            decisions=(Decision(1, NOW, HOSTILE, HOSTILE, True, False),),
            options={HOSTILE: HOSTILE, "nested": {HOSTILE: [HOSTILE]}},
            lineage={HOSTILE: [HOSTILE]},
        )
    )
    assert found.named("script") == []
    assert len(found.named("img")) == 2
    assert len(found.named("style")) == len(found.named("title")) == 1
    assert not [name for _, attributes in found.elements for name in attributes if name.startswith("on")]
    assert found.text.count("<script>alert(1)</script>") >= 14
    assert "49" not in found.text


STATES = {
    "queued": (True, "Waiting for a worker", "It is checked once the adaptation is finished"),
    "running": (True, "Under way", "It is checked once the adaptation is finished"),
    "cancelling": (True, "Being cancelled", "It is checked once the adaptation is finished"),
    "succeeded": (False, "Finished", "There is no candidate"),
    "fell_back": (False, "step 0 was kept", "There is no candidate"),
    "failed": (False, "Failed", "There is no candidate"),
    "cancelled": (False, "Cancelled", "There is no candidate"),
}


@pytest.mark.parametrize("state", STATES)
def test_card_of_each_state_shows_state_reason_and_gate(state: str) -> None:
    again, sentence, gate = STATES[state]
    progress = {"stage": "adapting", "epoch": 2, "epochs": 10}
    found = bare(state=state, reason="because of this", progress=progress)
    assert sentence in found.text
    assert gate in found.text
    assert "because of this" in found.text
    assert ("Adapting, epoch 2 of 10" in found.text) == again
    # As long as there is more to come, the page looks again by itself.
    refreshed = [
        attributes for attributes in found.named("meta") if attributes.get("http-equiv") == "refresh"
    ]
    assert bool(refreshed) == again


def test_card_of_a_running_job_shows_epochs_and_shares() -> None:
    found = bare(state="running", epochs=EPOCHS[:2], more=ROUTED)
    assert "Epoch by epoch" in found.text
    assert "Share of each model per layer" in found.text
    assert "They are drawn once the adaptation is finished" in found.text
    assert [circle for circle in found.named("circle") if circle["class"] == "chosen"] == []


def test_card_says_what_gain_to_expect_and_what_failed() -> None:
    shown = Page(full()).text
    assert "A gain of 3.1 points is expected." in shown
    assert shown.count("Its masks fall apart.") == 1


def test_card_with_a_passed_gate_offers_assignment_without_override() -> None:
    shown = Page(full(gate={"passed": True, "checks": []}, decisions=())).text
    assert "It may answer once a person assigns it" in shown
    assert "override" not in shown


def test_card_of_a_candidate_without_verdict_requires_an_override() -> None:
    shown = Page(full(gate=None, decisions=())).text
    assert "No verdict is recorded" in shown
    assert "by an override" in shown


def test_card_without_pictures_says_that_they_expired() -> None:
    found = Page(full(pictures=()))
    assert found.named("img") == []
    assert "have expired or were deleted" in found.text


def test_card_of_a_scan_job_has_no_gate() -> None:
    shown = bare(kind="scan", state="succeeded").text
    assert "no candidate to judge" in shown
    assert "For hospital" not in shown
    assert "Before and after" not in shown


def test_card_with_best_epoch_0_names_step_0() -> None:
    assert "step 0 chosen epoch" in Page(full(best=0)).text


def test_heat_map_normalises_shares_per_layer_and_colours_by_ratio() -> None:
    cells = dict(heat_map(COEFFICIENTS))
    assert [cell.share for cell in cells["aster"]] == [0.75, 0.25, 0.5]
    assert [cell.share for cell in cells["global"]] == [0.25, 0.75, 0.5]
    # A quarter is one halving of the half it began with; two would be the full colour.
    assert [(cell.tone, cell.strength) for cell in cells["global"][:1]] == [("less", 50)]
    assert cells["aster"][0].tone == "more"
    assert cells["aster"][2].strength == 0
    assert cells["aster"][0].title == "encoder1: aster 75.0%"


def test_heat_map_of_a_layer_with_zero_coefficients_shows_zero_shares() -> None:
    cells = dict(heat_map(shares_of(("head",), ("aster", "global"), ((0.0, 0.0),), "all layers")))
    assert [cell.share for cell in cells["aster"]] == [0.0, 0.0]
    assert cells["aster"][0].strength == 100


def test_attention_bars_are_proportional_and_names_are_escaped() -> None:
    shares = {"own": 0.5, "aster": 0.25, "<b>birch</b>": 0.25}
    content = full(more=JOINING.sections({"attention": shares}, ()), words=JOINING.words)
    shown = Page(content)
    own, aster, birch = (float(str(bar["width"])) for bar in shown.named("rect"))
    assert own == pytest.approx(2 * aster, rel=1e-3)
    assert aster == birch
    assert [bar["class"] for bar in shown.named("rect")] == ["own", "bar", "bar"]
    assert "<b>birch" not in content
    assert "Attention by source" in shown.text
    assert "chose the epoch" in shown.text
    assert "Attention by source" not in Page(full()).text


PICKED = {
    "cluster": "2",
    "options": {"criterion": "information"},
    "sites": {"1": ["elm", "fir"], "2": ["<b>hazel</b>"]},
    "costs": {"information": {"1": 0.25, "2": -0.5}, "entropy": {"1": 0.125, "2": None}},
}


def test_picking_section_lists_cluster_costs_and_marks_the_picked_one() -> None:
    content = render(card(state="succeeded", words=PICKING.words, more=PICKING.sections(PICKED, ())))
    shown = Page(content).text
    assert "Which cluster was picked" in shown
    assert "by information" in shown.replace("  ", " ")
    rows = re.findall(r"<tr><td><b>(.*?)</b></td>(.*?)</tr>", content, re.DOTALL)
    cells = {name: re.findall(r"<td.*?>(.*?)</td>", rest, re.DOTALL) for name, rest in rows}
    assert cells["1"] == ["elm, fir", "0.25", "0.125", ""]
    assert cells["2"] == ["&lt;b&gt;hazel&lt;/b&gt;", "-0.5", "–", '<b class="good">picked</b>']


@pytest.mark.parametrize("missing", ["cluster", "options", "sites", "costs"])
def test_incomplete_picking_result_has_no_section(missing: str) -> None:
    assert PICKING.sections({name: value for name, value in PICKED.items() if name != missing}, ()) == ()
    assert PICKING.sections({**PICKED, missing: 3}, ()) == () or missing == "cluster"


@pytest.mark.parametrize("found", [None, {}, "own", {"own": 1.5}, {"own": 0.5, "aster": "half"}])
def test_invalid_attention_shares_have_no_section(found: object) -> None:
    assert JOINING.sections({"attention": found}, ()) == ()
