"""A card from what is in the database, however much of it is there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from model_store.errors import StoreUnavailable
from model_store.manifest import CrossAttentionManifest
from model_store.store import Store
from model_store.versions import Versions
from service.adaptation.card.model import Card
from service.adaptation.card.page import render
from service.adaptation.card.reading import read_card, read_view
from service.database import Database
from service.errors import JobUnknown
from service.jobs import records
from service.jobs.files import JobFolder
from service.jobs.sections import Checks, Curves, HeatMap, Section
from service.kinds import ADAPTABLE
from service.settings import Settings
from tests.helpers.service.adapted_versions import publish_model, publish_space
from tests.helpers.service.queued import queued


@dataclass(frozen=True)
class Place:
    """What a card is read from."""

    settings: Settings
    store: Store
    database: Database

    def card(self, job_id: str) -> Card:
        return read_card(self.store, self.database, self.settings.open_files(), job_id)


@pytest.fixture
def here(database: Database, tmp_path: Path) -> Place:
    settings = Settings(store=tmp_path / "store", state_dir=tmp_path / "state")
    return Place(settings, Store(settings.store), database)


def submit(here: Place, **fields: Any) -> str:
    with here.database.write() as session:
        job = queued(
            session,
            here.settings,
            kind="adaptation",
            hospital="north",
            model="brain",
            parent="sha256:" + "0" * 64,
        )
        for name, value in fields.items():
            setattr(job, name, value)
        return job.id


def note(here: Place, job_id: str, kind: records.EventType, *data: dict[str, Any]) -> None:
    with here.database.write() as session:
        for item in data:
            records.append_event(session, records.get(session, job_id), kind, item)


def table(*rows: list[Any], layers: int = 2) -> dict[str, Any]:
    return {"layers": [f"l{i}" for i in range(layers)], "models": ["a", "global"], "values": list(rows)}


def about(card: Card, form: type[Checks | Curves | HeatMap]) -> Section:
    (found,) = [each for each in card.job.sections if isinstance(each.body, form)]
    return found


def titles_of_curves(card: Card) -> list[str]:
    body = about(card, Curves).body
    assert isinstance(body, Curves)
    return [curve.title for curve in body.curves]


def test_queued_job_has_a_card(here: Place) -> None:
    card = here.card(submit(here))
    assert (card.job.state, card.model, card.job.candidate, card.job.epochs) == ("queued", "brain", None, [])
    assert card.under_way
    assert render(card).count("Waiting for a worker") == 1


def test_card_of_a_running_job_keeps_the_latest_event_of_each_epoch(here: Place) -> None:
    progress = {"stage": "adapting", "epoch": 1, "epochs": 5, "seconds_left": 40}
    job = submit(here, state="running", progress=progress, parent=publish_space(here.store, 0).digest)
    first = {"epoch": 0, "loss": 0.5, "entropy": 0.4, "coefficients": table([0.5, 0.5], [0.5, 0.5])}
    latest = {"epoch": 1, "loss": 0.3, "entropy": None, "safe": False, "reason": "gone"}
    again = {**latest, "loss": 0.2, "coefficients": table([0.9, 0.1], [0.5, 0.5])}
    note(here, job, "epoch", first, latest, again)
    note(here, job, "warning", {"message": "one scan is dark"})
    card = here.card(job)
    # The attempt that took over said epoch 1 again.
    section = about(card, Curves)
    assert section.reasons == ("Epoch 1 is not safe: gone",)
    assert isinstance(section.body, Curves)
    assert (section.body.epochs, section.body.unsafe) == ((0, 1), (1,))
    assert [(curve.title, curve.values) for curve in section.body.curves] == [
        ("Loss", (0.5, 0.2)),
        ("Entropy", (0.4, None)),
    ]
    shares = about(card, HeatMap).body
    assert isinstance(shares, HeatMap)
    assert shares.shares[0] == (0.9, 0.1)
    assert card.job.status.doing == "adapting, epoch 1 of 5, about 40 s left"
    assert card.job.warnings == ["one scan is dark"]


def test_unmeasured_check_is_neither_passed_nor_failed(
    here: Place,
) -> None:
    checks = [
        {"name": "size_factor", "value": 1.25, "limit": 2.0, "bound": "at most", "passed": True},
        {"name": "stability", "value": None, "limit": 0.7, "bound": "at least", "passed": True},
        # Not a number: JSON has none for it, and the gate has failed it.
        {
            **{"name": "distance", "value": None, "limit": 0.1, "bound": "at most", "passed": False},
            "failure": "It is too far.",
        },
        {"name": "older_one", "value": 1, "limit": 2, "bound": "at least", "passed": False, "meaning": "any"},
    ]
    gate = {"passed": False, "checks": checks, "summary": ["No gain is expected."]}
    card = here.card(submit(here, state="failed", gate=gate))
    section = about(card, Checks)
    assert isinstance(section.body, Checks)
    assert [(c.name, c.found, c.limit, c.outcome) for c in section.body.rows] == [
        ("size factor", "1.25", "≤ 2", "passed"),
        ("stability", "–", "≥ 0.7", "not measured"),
        ("distance", "–", "≤ 0.1", "failed"),
        ("older one", "1", "≥ 2", "failed"),
    ]
    # The worker that wrote the last one knew no sentence for its failure.
    assert section.reasons == ("It is too far.", "Not passed: older one (any).")
    assert section.sentences[-2] == "No gain is expected."
    assert section.tone == "bad"


@pytest.mark.parametrize(
    "found",
    [
        None,
        "all",
        {"layers": ["l0"]},
        table([0.5, 0.5]),
        table([0.5, 0.5], [0.5]),
        table([0.5, "much"], [0.5, 0.5]),
        table([0.5, None], [0.5, 0.5]),
        table([0.5, -1.0], [0.5, 0.5]),
    ],
)
def test_malformed_coefficients_are_left_out_of_the_card(here: Place, found: Any) -> None:
    job = submit(here, parent=publish_space(here.store, 0).digest)
    note(here, job, "epoch", {"epoch": 0, "loss": 0.1, "coefficients": found})
    assert not [each for each in here.card(job).job.sections if isinstance(each.body, HeatMap)]


@pytest.mark.parametrize(("epochs", "shown"), [(0, None), (5, 0)])
def test_chosen_epoch_is_shown_where_there_were_epochs(here: Place, epochs: int, shown: int | None) -> None:
    job = submit(here, state="succeeded", result={"epochs": epochs, "best_epoch": 0})
    assert here.card(job).best_epoch == shown


def test_card_ignores_malformed_stored_fields(here: Place) -> None:
    job = submit(
        here,
        state="succeeded",
        progress={"stage": 3},
        result={"best_epoch": "two", "scans": "many", "images": None},
        gate={"verdict": "fine", "passed": "yes"},
        candidate_name="brain.at-north",
        candidate_version=7,
        candidate_digest="sha256:" + "1" * 64,
    )
    note(here, job, "epoch", {"epoch": "first"}, {"epoch": 1, "loss": "low", "foreground": True})
    card = here.card(job)
    assert card.job.candidate is not None
    assert card.job.candidate.reference == "brain.at-north@7"
    assert (card.best_epoch, card.scans, card.passed) == (None, None, None)
    assert [each.title for each in card.job.sections] == ["Checks of the new version"]
    assert "No verdict is recorded" in render(card)


def test_card_pairs_before_and_after_pictures(here: Place) -> None:
    job = submit(here)
    folder = JobFolder(here.settings.open_files(), job)
    for name in ("1-before", "1-after", "2-before", "notes"):
        folder.write(f"pictures/{name}.png", name.encode())
    ((before, after),) = here.card(job).pictures
    assert (before.caption, before.content) == ("scan 1, before", b"1-before")
    assert (after.caption, after.content) == ("scan 1, after", b"1-after")


def test_card_of_a_withdrawn_parent_uses_the_words_of_its_kind(here: Place) -> None:
    shared = publish_model(here.store, "brain.global", part_of="brain")
    manifest = shared.manifest
    parent = here.store.publish(
        CrossAttentionManifest(
            name="brain", task=manifest.task, lineage=manifest.lineage, global_model=shared.digest, inside={}
        ),
        {},
    )
    job = submit(here, parent=parent.digest)
    note(here, job, "epoch", {"epoch": 0, "loss": 0.1, "dice": 0.5})
    here.store.withdraw("brain@1", actor="ada", reason="a site withdrew")
    card = here.card(job)
    assert (card.model, card.words) == ("brain@1", ADAPTABLE["cross-attention"].words)
    assert titles_of_curves(card) == ["Loss", "Dice"]


def test_card_without_its_parent_names_no_kind(here: Place) -> None:
    job = submit(here, state="succeeded", result={"attention": {"own": 1.0}})
    note(here, job, "epoch", {"epoch": 0, "loss": 0.5, "dice": 0.4})
    card = here.card(job)
    assert (card.model, titles_of_curves(card)) == ("brain", ["Loss"])
    assert [each.title for each in card.job.sections] == ["Checks of the new version", "Epoch by epoch"]
    assert "no longer in the store" in render(card)
    assert all(found.words.truth not in render(card) for found in ADAPTABLE.values())


def test_job_is_shown_without_its_store(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> None:
        raise StoreUnavailable("the bucket does not answer")

    job = submit(here, parent=publish_space(here.store, 0).digest)
    monkeypatch.setattr(Versions, "find", lost)
    found = read_view(here.store, here.database, job)
    assert (found.state, [each.title for each in found.sections]) == ("queued", ["Checks of the new version"])


def test_card_of_an_unknown_job_is_rejected(here: Place) -> None:
    with pytest.raises(JobUnknown):
        here.card("0" * 32)
