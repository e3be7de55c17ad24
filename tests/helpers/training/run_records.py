"""The record of an invented run."""

from __future__ import annotations

from model_store.task import Task
from training.engine.history import RoundEntry, SiteEntry
from training.record import PublishedRecord, RunRecord, SiteRecord

TASK = Task(name="nodules", labels={"nodule": (1,)}, size=(16, 16))


def entry(dice: float, withheld: tuple[str, ...] = ()) -> SiteEntry:
    metrics = {"loss": 1 - dice, "val_dice": dice}
    return SiteEntry(8.0, metrics, {"weights": 1000, "metrics": 16}, {"weights": 500}, withheld, 0.5)


def make_record(**changes: object) -> RunRecord:
    rounds = (
        RoundEntry("train", 0, 3, 1.0, {"north": entry(0.25), "south": entry(0.5)}),
        RoundEntry("train", 1, 3, 2.0, {"north": entry(0.75)}, {"south": "its <worker> died"}),
        RoundEntry("train", 2, 3, 3.0, {"north": entry(0.5, ("scores",)), "south": entry(0.625)}),
        RoundEntry("export", 0, 1, 0.5, {"north": entry(0.5)}, {}, {"south": "no consent to 'export'"}),
    )
    counts = {"train": 6, "val": 2, "test": 2}
    published = PublishedRecord(
        reference="nodules.north@2",
        digest="sha256:" + "ab" * 32,
        kind="model",
        role="inside",
        site="north",
        metrics={"val_dice": 0.75},
    )
    content = {
        "run": "0123abcd",
        "method": "iop-fl",
        "task": TASK,
        "task_inferred": True,
        "data": "sha256:" + "cd" * 32,
        "sites": tuple(SiteRecord(name=n, files=counts, patients=counts) for n in ("north", "south")),
        "left_out": ("west",),
        "config": {"rounds": 3, "learning_rate": 0.001, "local_steps": None},
        "settings": {"seed": 7, "egress": {}},
        "rounds": rounds,
        "published": (published,),
        "warnings": ("the task was inferred <look at it>",),
        "software": {"torch": "2.13"},
    }
    return RunRecord.model_validate(content | changes)
