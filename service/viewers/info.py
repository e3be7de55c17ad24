"""What viewers may choose, in the form of MONAI Label's `/info/`: models, their labels and their options.

3D Slicer shows a list as a box of choices, of which the first is chosen, and sends every choice with every
request. An empty choice counts as left out.
"""

from __future__ import annotations

from typing import Any

from model_store.artefact import Artefact
from model_store.store import Store
from personalization.options.presets import AUTO
from service.about import NOTICE, locum_version
from service.catalog.parts import personalizations
from service.catalog.version import offered_names
from service.catalog.ways import Ways, ways_of
from service.database import Database
from service.database.hospitals import visible_hospitals
from service.prediction.output import label_names

_NO_CHOICE = ""


def describe(store: Store, database: Database) -> dict[str, Any]:
    """Describe the segmentation models that the caller may use. Blocking: call it in a thread.

    There is no `config` beside `models`: viewers take that for the sign of an outdated server. A model's
    labels are those of its newest version, without the background, which viewers would give a value.
    """
    with database.read() as session:
        hospitals = [hospital.id for hospital in visible_hospitals(session)]
    if database.caller.hospitals is None:
        hospitals = [_NO_CHOICE, *hospitals]
    elif hospitals:
        hospitals = [*hospitals, _NO_CHOICE]
    models = {}
    for name in offered_names(store):
        newest = store.open(name, verify=False)
        if newest.manifest.task.kind == "segmentation":
            models[name] = _model(newest, ways_of(store, newest), hospitals)
    labels = dict.fromkeys(label for model in models.values() for label in model["labels"])
    return {
        "name": "Locum",
        "description": f"Federated models, personalized to each hospital: {NOTICE}",
        "version": locum_version(),
        "labels": list(labels),
        "models": models,
        # Locum neither trains on a viewer's labels nor chooses the next scan to label.
        "trainers": {},
        "strategies": {},
        "scoring": {},
        "train_stats": {},
    }


def _model(newest: Artefact, ways: Ways, hospitals: list[str]) -> dict[str, Any]:
    config = {"personalization": personalizations(newest, ways), "hospital": hospitals or [_NO_CHOICE]}
    if named := [each for each in ways.by_scan if each != AUTO]:
        config["preset"] = [_NO_CHOICE, *named]
    return {
        "type": "segmentation",
        "labels": label_names(newest.manifest.task),
        "dimension": 3,
        "description": f"{newest}, task {newest.manifest.task.name}: {NOTICE}",
        "config": config,
    }
