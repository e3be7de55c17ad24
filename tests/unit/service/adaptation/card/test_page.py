"""The card as a page: what it says in each state, and that it says nothing else."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser

import pytest

from service.adaptation.card.model import Card, CheckRow, Decision, Epoch, Gate, Picture
from service.adaptation.card.page import heat_map, render
from service.kinds import ADAPTABLE
from service.kinds.card import HeatMap, Section

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
PNG = b"\x89PNG\r\n\x1a\nnot really"
ROUTING, JOINING, PICKING = (ADAPTABLE[name] for name in ("routing-space", "cross-attention", "clusters"))


def routed(layers: list[str], models: list[str], *values: list[float]) -> tuple[Section, ...]:
    coefficients = {"layers": layers, "models": models, "values": values}
    return ROUTING.sections({"coefficients": coefficients}, ())


COEFFICIENTS = HeatMap(("encoder1", "head"), ("aster", "global"), ((0.75, 0.25), (1.0, 3.0)), "all layers")
ROUTED = routed(["encoder1", "head"], ["aster", "global"], [0.75, 0.25], [1.0, 3.0])
FULL = Card(
    job="a" * 32,
    kind="adaptation",
    state="succeeded",
    model="brain@2",
    words=ROUTING.words,
    hospital="dune",
    attempt=2,
    created=NOW,
    started=NOW,
    finished=NOW + timedelta(seconds=3725),
    candidate="brain.at-dune@1",
    candidate_digest="sha256:" + "c" * 64,
    parent_digest="sha256:" + "b" * 64,
    scans=12,
    images=240,
    best_epoch=1,
    epochs=(
        Epoch(0, 0.25, {"entropy": 0.2, "shape": None}, 0.05, 1.0),
        Epoch(1, 0.2, {"entropy": 0.1, "shape": None}, 0.04, 0.97),
        Epoch(2, None, {"entropy": None, "shape": None}, 0.0, 0.1, False, "the foreground is gone"),
    ),
    sections=ROUTED,
    gate=Gate(
        False,
        (
            CheckRow("agreement", "as the parent", 0.81, "≥ 0.5", True),
            CheckRow("stability", "over halves", None, "≥ 0.7", None),
            CheckRow("fragments", "pieces", 7.3, "≤ 2", False, "Its masks fall apart."),
        ),
        ("A gain of 3.1 points is expected.",),
    ),
    pictures=((Picture("scan 1, before", PNG), Picture("scan 1, after", PNG + b"!")),),
    warnings=("scan 3 is brighter than training's",),
    decisions=(Decision(3, NOW, "ada", "looked at all of them", True, True),),
    options={"preset": "paper", "epochs": 10, "routing_rate": None},
    lineage={"method": "iop-fl-routing", "sites": ("aster",)},
)
BARE = Card(job="a" * 32, kind="adaptation", state="queued", model="brain@2", words=ROUTING.words)


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


def page(card: Card) -> Page:
    return Page(render(card))


def test_card_shows_every_known_fact() -> None:
    shown = page(FULL).text
    for said in (
        "brain.at-dune@1",
        "For hospital dune",
        "refused gate",
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
    assert render(FULL) == render(FULL)


def test_card_page_refers_to_no_other_file() -> None:
    found = page(FULL)
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
    assert "url(" not in render(FULL)
    assert "http://" not in render(FULL)
    assert "https://" not in render(FULL)


HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;{{ 7*7 }}</title></style>"


def test_card_page_escapes_hostile_text() -> None:
    found = page(
        replace(
            FULL,
            model=HOSTILE,
            hospital=HOSTILE,
            reason=HOSTILE,
            stage=HOSTILE,
            candidate=HOSTILE,
            candidate_withdrawn=HOSTILE,
            warnings=(HOSTILE,),
            epochs=(Epoch(0, 0.1, {HOSTILE: 0.2}, safe=False, reason=HOSTILE), Epoch(1, 0.1)),
            sections=routed([HOSTILE], [HOSTILE, "global"], [0.5, 0.5]),
            gate=Gate(False, (CheckRow(HOSTILE, HOSTILE, 1.0, HOSTILE, False),)),
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
    "queued": (True, "Waiting for a worker", "It judges once the adaptation is finished"),
    "running": (True, "Under way", "It judges once the adaptation is finished"),
    "cancelling": (True, "Being cancelled", "It judges once the adaptation is finished"),
    "succeeded": (False, "Finished", "There is no candidate"),
    "fell_back": (False, "step 0 was kept", "There is no candidate"),
    "failed": (False, "Failed", "There is no candidate"),
    "cancelled": (False, "Cancelled", "There is no candidate"),
}


@pytest.mark.parametrize("state", STATES)
def test_card_of_each_state_shows_state_reason_and_gate(state: str) -> None:
    again, sentence, gate = STATES[state]
    found = page(replace(BARE, state=state, reason="because of this", stage="adapting, epoch 2 of 10"))
    assert state.replace("_", " ") in found.text
    assert sentence in found.text
    assert gate in found.text
    assert "because of this" in found.text
    assert ("adapting, epoch 2 of 10" in found.text) == again
    # As long as there is more to come, the page looks again by itself.
    refreshed = [
        attributes for attributes in found.named("meta") if attributes.get("http-equiv") == "refresh"
    ]
    assert bool(refreshed) == again


def test_card_of_a_running_job_shows_epochs_and_shares() -> None:
    found = page(replace(BARE, state="running", epochs=FULL.epochs[:2], sections=ROUTED, stage="adapting"))
    assert "Epoch by epoch" in found.text
    assert "Share of each model per layer" in found.text
    assert "They are drawn once the adaptation is finished" in found.text
    assert [circle for circle in found.named("circle") if circle["class"] == "chosen"] == []


def test_card_says_what_gain_to_expect_and_what_failed() -> None:
    shown = page(FULL).text
    assert "A gain of 3.1 points is expected." in shown
    assert shown.count("Its masks fall apart.") == 1


def test_card_with_a_passed_gate_offers_assignment_without_override() -> None:
    shown = page(replace(FULL, gate=Gate(True, ()), decisions=())).text
    assert "may be assigned" in shown
    assert "override" not in shown


def test_card_of_a_candidate_without_verdict_requires_an_override() -> None:
    shown = page(replace(FULL, gate=None, decisions=())).text
    assert "No verdict is recorded" in shown
    assert "explicit override" in shown


def test_card_without_pictures_says_that_they_expired() -> None:
    found = page(replace(FULL, pictures=()))
    assert found.named("img") == []
    assert "have expired or were deleted" in found.text


def test_card_of_a_scan_job_has_no_gate() -> None:
    shown = page(replace(BARE, kind="scan", state="succeeded", hospital=None)).text
    assert "no candidate to judge" in shown
    assert "For hospital" not in shown
    assert "Before and after" not in shown


def test_card_with_best_epoch_0_names_step_0() -> None:
    assert "step 0 chosen epoch of 2" in page(replace(FULL, best_epoch=0)).text


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
    cells = dict(heat_map(HeatMap(("head",), ("aster", "global"), ((0.0, 0.0),), "all layers")))
    assert [cell.share for cell in cells["aster"]] == [0.0, 0.0]
    assert cells["aster"][0].strength == 100


def test_attention_bars_are_proportional_and_names_are_escaped() -> None:
    shares = {"own": 0.5, "aster": 0.25, "<b>birch</b>": 0.25}
    sections = (*FULL.sections, *JOINING.sections({"attention": shares}, ()))
    content = render(replace(FULL, sections=sections, words=JOINING.words))
    shown = Page(content)
    own, aster, birch = (float(str(bar["width"])) for bar in shown.named("rect"))
    assert own == pytest.approx(2 * aster, rel=1e-3)
    assert aster == birch
    assert [bar["class"] for bar in shown.named("rect")] == ["own", "bar", "bar"]
    assert "<b>birch" not in content
    assert "Attention by source" in shown.text
    assert "chose the epoch" in shown.text
    assert "Attention by source" not in page(FULL).text


PICKED = {
    "cluster": "2",
    "options": {"criterion": "information"},
    "sites": {"1": ["elm", "fir"], "2": ["<b>hazel</b>"]},
    "costs": {"information": {"1": 0.25, "2": -0.5}, "entropy": {"1": 0.125, "2": None}},
}


def test_picking_section_lists_cluster_costs_and_marks_the_picked_one() -> None:
    content = render(
        replace(BARE, state="succeeded", words=PICKING.words, sections=PICKING.sections(PICKED, ()))
    )
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
