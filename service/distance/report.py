"""Measure the scans of a folder, one by one, and say in words what follows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from locum.commands.batch import Found, find, group
from locum.errors import ScanInvalid
from locum.scans import opened
from model_store.artefact import Artefact
from model_store.errors import ReferenceNotFound, ScanError, StoreError, TaskError
from model_store.guard import ReferenceStatistics
from model_store.lens import FINGERPRINT, Distance, Distances, Fingerprint, Kind, Measure, Seen, Step
from model_store.lens import fingerprint_of as stored_fingerprint
from model_store.lens.distance import UNUSUAL
from model_store.lens.fit import LIKE
from model_store.lens.scan import LEAST_GRID
from model_store.scan import Limits
from model_store.store import Store
from model_store.task import Task
from service.inference.pipeline import Stopwatch, open_scan
from service.kinds import kind_of
from service.kinds.lens import TITLES, has_lens

# Scans that are measured in some ten seconds on one core.
MOST_IMAGES: Final = 50
MOST_VOLUMES: Final = 10
WORDS: Mapping[Measure, str] = {
    "polarity": "looks inverted",
    "field": TITLES["field"],
    "spectrum": TITLES["spectrum"],
    "quantiles": TITLES["quantiles"],
    "spacing": "spacing",
    "size": "size",
}
# As in the folders of a federation, in any case.
_IMAGES = ("images", "imagestr", "imgs")


@dataclass(frozen=True)
class Report:
    """What was found.

    Attributes:
        model: the version, and `fingerprint` its own.
        scans: the distance of each scan by its name, in order; `skipped` has why others were not measured.
        found: the number of scans in the folder, of which some may have been left out.
        whole: the distance of all that were measured, `seen` their features.
        steps: what a lens would do, with the share of each shift that it takes back.
        lensed: whether Locum fits a lens to this model at all.
    """

    model: Artefact
    fingerprint: Fingerprint
    scans: Mapping[str, Distance]
    skipped: Mapping[str, str]
    found: int
    whole: Distance
    seen: Mapping[Kind, Seen]
    steps: Mapping[Step, float]
    lensed: bool

    @property
    def inverted(self) -> int:
        """How many of the scans look inverted."""
        return sum(each.polarity.inverted for each in self.scans.values())

    def sentences(self) -> list[str]:
        """What Locum would do, and what it cannot."""
        said = [self._advice()]
        if 0 < self.inverted < len(self.scans):
            said.append(f"{self.inverted} of {len(self.scans)} scans look inverted, and the others do not.")
        said += [
            f"The {extent} is {ratio_in_words(each.ratio)} in training: no lens changes that."
            for extent, each in self.whole.apart.items()
            if each.shift > UNUSUAL
        ]
        if self.fingerprint.factor is not None:
            said.append(
                "The model knows the scans of one group alone, not how far hospitals are apart: a mild shift "
                "is not seen."
            )
        return said

    def _advice(self) -> str:
        shifts = self.whole.shifts
        most = max(TITLES, key=lambda kind: shifts[kind])
        if shifts[most] <= UNUSUAL and not self.steps:
            return "natural: these scans look like the members'; a lens would leave them as they are."
        negated = "polarity" in self.steps
        if negated:
            where = "inverted: these scans look like the members' in negative"
        elif shifts[most] > UNUSUAL:
            where = f"far: these scans are not like the members', most in {TITLES[most]}"
        else:
            where = "near: these scans are a little unlike the members'"
        if not self.lensed:
            return f"{where}; Locum fits no lens to this model."
        if not self.steps:
            return f"{where}; a lens would leave them as they are, since it cannot take that back."
        alike = abs(self.whole.polarity.correlation)
        if self.fingerprint.likeness >= LIKE and alike < LEAST_GRID:
            return (
                f"{where}; a lens would be refused: these scans do not show what the members' show "
                f"(correlation of the mean brightness {alike:.2f}, expected {LEAST_GRID} or more)."
            )
        moved = [f"{TITLES[kind]} by {100 * self.steps[kind]:.0f} %" for kind in TITLES if kind in self.steps]
        does = ["negate them"] * negated + [f"take back {', '.join(moved)}"] * bool(moved)
        return f"{where}; a lens would {' and '.join(does)}."

    def to_json(self) -> dict[str, Any]:
        """The report for programs."""
        return {
            "model": str(self.model),
            "digest": self.model.digest,
            "members": self.fingerprint.members,
            "found": self.found,
            "scans": [{"name": name, **facts(each)} for name, each in self.scans.items()],
            "skipped": [{"name": name, "reason": why} for name, why in self.skipped.items()],
            "all": {"scans": len(self.scans), "inverted_scans": self.inverted, **facts(self.whole)},
            "lens": dict(self.steps) if self.lensed else None,
            "sentences": self.sentences(),
        }


def facts(found: Distance) -> dict[str, Any]:
    """A distance as JSON: R of each kind, the ratios of spacing and size, or null, and what differs most."""
    ratios = {
        extent: found.apart[extent].ratio if extent in found.apart else None for extent in ("spacing", "size")
    }
    shifts: dict[str, float] = {kind: found.shifts[kind] for kind in TITLES}
    return {**shifts, **ratios, "inverted": found.polarity.inverted, "most": found.most}


def ratio_in_words(ratio: float) -> str:
    """How many times a spacing or size is beyond those of training."""
    return f"{ratio:.2g} times the largest" if ratio > 1 else f"{ratio:.2g} of the smallest"


def model_of(store: Store, reference: str) -> Artefact:
    """Open a version. Raises StoreError, also of one that does not know what its scans look like."""
    found = store.open(reference)
    if FINGERPRINT in found.manifest.files:
        return found
    manifest = found.manifest
    if manifest.part_of is not None:
        what = f"it is a part: name {manifest.part_of}, or what that was made from"
    elif manifest.adapted_to is not None:
        what = f"it was adapted to hospital '{manifest.adapted_to}': name the model that it was made from"
    elif not manifest.references():
        what = (
            "it does not know what scans of its origin look like. Make another version that does, from such "
            f"scans, a folder for each hospital: locum store fingerprint {found} FOLDER FOLDER "
            f"--store {store.root}"
        )
    else:
        what = "train it again: every method writes one where two members have three patients each"
    raise StoreError(f"{found}: expected a model with {FINGERPRINT}, found none: {what}")


def measure(
    store: Store,
    model: Artefact,
    folder: str,
    limits: Limits,
    every: bool,
    watched: Callable[[Sequence[Found]], Iterable[Found]] = iter,
) -> Report:
    """Measure the scans of a folder.

    Args:
        store: of the model.
        model: with a fingerprint.
        folder: with scans, itself or in `images`; or one scan.
        limits: of a scan.
        every: whether to measure all scans, in place of some that are evenly spaced.
        watched: shows how far it is.

    Raises:
        StoreError: the model's fingerprint cannot be read.
        ScanInvalid: there is no scan.
        ReferenceNotFound: no scan could be measured.
    """
    known, task = stored_fingerprint(model), model.manifest.task
    channels = [each.name for each in task.channel_list] if task.separate_channels else []
    there = group(find([str(_images_in(Path(folder)))]), channels)
    most = MOST_VOLUMES if task.is_volume else MOST_IMAGES
    chosen = there if every else evenly(there, most)
    parts = kind_of(model).parts(model)
    distances = Distances(known, task, _statistics(store, model, parts.global_model))
    scans, skipped = dict[str, Distance](), dict[str, str]()
    for each in watched(chosen):
        try:
            with opened(each.scan) as upload:
                # A byte more than is allowed is refused as what is larger.
                content = upload.rewound().read(limits.max_bytes + 1)
            scan = open_scan(content, task, limits, Stopwatch()).scan
            scans[each.name] = distances.add(_patient_of(each, task), scan)
        except (ScanError, ScanInvalid, TaskError, OSError) as error:
            skipped[each.name] = str(error)
    if not scans:
        lines = "\n".join(f"  {name}: {why}" for name, why in skipped.items())
        raise ReferenceNotFound(f"{folder}: expected scans that fit {model}, found none:\n{lines}")
    return Report(
        model,
        known,
        scans,
        skipped,
        len(there),
        distances.whole(),
        distances.seen,
        distances.steps(),
        has_lens(model, parts),
    )


def evenly(scans: Sequence[Found], most: int) -> Sequence[Found]:
    """So many of the scans at most, evenly spaced."""
    count = min(len(scans), most)
    return [scans[math.floor((place + 0.5) * len(scans) / count)] for place in range(count)]


def _images_in(folder: Path) -> Path:
    """The folder with images of a site, which has masks beside it; else the folder itself."""
    if not folder.is_dir():
        return folder
    inside = [each for each in folder.iterdir() if each.is_dir() and each.name.casefold() in _IMAGES]
    return inside[0] if len(inside) == 1 else folder


def _patient_of(scan: Found, task: Task) -> str:
    """As the task says, else the scan itself."""
    with suppress(TaskError):
        return task.patient_of(scan.stem.rpartition("/")[2])
    return scan.name


def _statistics(store: Store, model: Artefact, network: str | None) -> ReferenceStatistics | None:
    """What the guard knows of the training scans: that of the global model, of a composite."""
    own = model if network in (None, model.digest) else store.by_digest(str(network))
    found: ReferenceStatistics | None = getattr(own.manifest, "statistics", None)
    return found
