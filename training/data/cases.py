"""Data classes of a federation: its sites, and the cases of a site."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Literal

from typing_extensions import TypeVar

from model_store.task import Task
from training.data.consistency import Seen, other_units
from training.errors import FederationError

Split = Literal["train", "val", "test"]
FEW_PATIENTS = 3
# A figure of the end that rests on fewer is marked, and takes part in no rank and no choice.
FEW_CASES = 10
SPLITS: tuple[Split, ...] = ("train", "val", "test")


@dataclass(frozen=True)
class Case:
    """One image and its mask. `split` is None until cases.csv or `split_by_patient` sets it.

    `further` has the files of the other channels, in the order of the task's, where each channel is a file.
    `values` are pairs of a value of the mask and the task's, where they differ.
    """

    image: Path
    mask: Path
    patient: str
    split: Split | None = None
    further: tuple[Path, ...] = ()
    values: tuple[tuple[int, int], ...] = ()

    @property
    def images(self) -> tuple[Path, ...]:
        """The files of all channels, or the one that has them all."""
        return (self.image, *self.further)

    @property
    def name(self) -> str:
        """The name of the image's file or folder, with accents as one character each (NFC).

        A case of several files is called by its mask's, which has no channel's name in it.
        """
        return unicodedata.normalize("NFC", self.mask.name if self.further else self.image.name)


@dataclass(frozen=True)
class LabelledCase:
    """One image or volume with a class label. `label` is the class index; `name` is unique within the site.

    For an image in an .npz, `image` is the file and `row` the name of the array and the index in it.
    """

    name: str
    image: Path
    label: int
    patient: str
    split: Split | None = None
    row: tuple[str, int] | None = None


AnyCase = TypeVar("AnyCase", Case, LabelledCase, default=Case)


@dataclass(frozen=True)
class SiteCounts:
    """How many files and patients a site has in each split."""

    files: Mapping[Split, int]
    patients: Mapping[Split, int]


@dataclass(frozen=True)
class Site(Generic[AnyCase]):
    """One hospital: its name (that of the folder) and its cases, ordered by file name.

    `digest` is a sha256 over the cases' names, patients and splits and the bytes of their files. `empty` says
    that no mask has a pixel of any label, `labelled` how many masks have each label. `undrawn` are the labels
    that the site does not draw: they are in none of its masks, and in those of others. `notes` are remarks on
    how its files were read, `seen` are the intensities and the spacing of its scans.
    """

    name: str
    cases: tuple[AnyCase, ...]
    digest: str = field(default="", compare=False)
    empty: bool = field(default=False, compare=False)
    labelled: Mapping[str, int] = field(default_factory=dict, compare=False)
    undrawn: tuple[str, ...] = field(default=(), compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)
    seen: Seen | None = field(default=None, compare=False)

    @property
    def size(self) -> int:
        """The number of cases."""
        return len(self.cases)

    @property
    def splits_digest(self) -> str:
        """A sha256 over the split of every case."""
        splits = {case.name: case.split for case in self.cases}
        return hashlib.sha256(json.dumps(splits, sort_keys=True).encode()).hexdigest()

    @property
    def counts(self) -> SiteCounts:
        """Files and patients by split."""
        by_split = {split: self.of_split(split) for split in SPLITS}
        return SiteCounts(
            {split: len(cases) for split, cases in by_split.items()},
            {split: len({case.patient for case in cases}) for split, cases in by_split.items()},
        )

    @property
    def patients(self) -> tuple[str, ...]:
        """The patients, sorted and without duplicates."""
        return tuple(sorted({case.patient for case in self.cases}))

    def of_split(self, split: Split) -> tuple[AnyCase, ...]:
        """Return the cases of one split."""
        return tuple(case for case in self.cases if case.split == split)

    def assigned(self, splits: dict[str, Split]) -> Site[AnyCase]:
        """Return the site with every case in the split of its patient."""
        return replace(self, cases=tuple(replace(case, split=splits[case.patient]) for case in self.cases))


@dataclass(frozen=True)
class RemoteSite:
    """A hospital on the network, as the operator knows it: digests and counts, no cases.

    The fields are those that the hospital computes with `Site` from its own folder.
    """

    name: str
    digest: str
    splits_digest: str
    counts: SiteCounts

    @property
    def size(self) -> int:
        """The number of cases."""
        return sum(self.counts.files.values())


def digest_of_cases(rows: Iterable[Sequence[str]]) -> str:
    """Compute a site's digest from one row of fields per case."""
    hasher = hashlib.sha256()
    for fields in rows:
        # A separator that no file name can contain makes the fields unambiguous.
        hasher.update("\0".join(fields).encode() + b"\0")
    return hasher.hexdigest()


def digest_of_sites(task: Task, sites: Iterable[Site[Any] | RemoteSite]) -> str:
    """Compute a federation's digest from its sites' digests, which a hospital can send without its files."""
    hasher = hashlib.sha256(task.model_dump_json().encode())
    for site in sites:
        hasher.update(f"{site.name}\0{site.digest}\0".encode())
    return f"sha256:{hasher.hexdigest()}"


@dataclass(frozen=True)
class Federation(Generic[AnyCase]):
    """The sites of one task.

    `inferred` says that no task was given and `task` was inferred from the data. `digest` is a sha256 over
    the task, the names, the patients and the bytes of all files: two federations with equal digests train
    identically. Each group in `repeated` names images (`SITE/images/FILE`) with identical bytes that belong
    to different patients. `unlabelled` has the labels that no mask of any site has.
    """

    root: Path
    task: Task
    sites: tuple[Site[AnyCase], ...]
    inferred: bool
    digest: str
    repeated: tuple[tuple[str, ...], ...] = ()
    unlabelled: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The sites' names, in order."""
        return tuple(site.name for site in self.sites)

    def site(self, name: str) -> Site[AnyCase]:
        """Return the site of that name. Raises KeyError."""
        for site in self.sites:
            if site.name == name:
                return site
        raise KeyError(f"no site '{name}' in {self.root}; expected one of {', '.join(self.names)}")

    def only(self, names: Iterable[str]) -> Federation[AnyCase]:
        """Return the federation with the named sites only. The digest stays that of the whole folder."""
        kept = set(names)
        return replace(self, sites=tuple(site for site in self.sites if site.name in kept))


@dataclass(frozen=True)
class Layout:
    """How the files of a kind of task are laid out in folders.

    holds: whether a federation's folder without task.yaml is laid out so.
    read: (folder, task, by_value) -> the federation, read and checked. Without a task it is inferred, with
        `by_value` as `load_federation` takes it.
    read_site: (folder, task) -> a site, read and checked.
    inferred: what the labels or classes, channels and size of an inferred task came from, in words.
    """

    holds: Callable[[Path], bool]
    read: Callable[[Path, Task | None, bool], Federation[Any]]
    read_site: Callable[[Path, Task], Site[Any]]
    inferred: Callable[[Task], str]


def few_patients(validated: int) -> str:
    """Say on which patients a site validates, where these are fewer than three; empty of more.

    A site without validation patients validates on those that it trains on.
    """
    if validated >= FEW_PATIENTS:
        return ""
    return {0: "training patients", 1: "1 patient"}.get(validated, f"{validated} patients")


def data_warnings(sites: Sequence[Site[Any] | RemoteSite]) -> list[str]:
    """Say which sites can be trained on, but probably are a mistake."""
    found = [
        f"site '{site.name}': no mask has a pixel of any label, so that it trains on background alone; check "
        "its masks and the values in task.yaml, or leave the site out"
        for site in sites
        if isinstance(site, Site) and site.empty
    ]
    known = {site.name: site.seen for site in sites if isinstance(site, Site) and site.seen is not None}
    for name, seen in known.items():
        others = [other for each, other in known.items() if each != name]
        found += filter(None, [other_units(name, seen, others)])
    found += [note for site in sites if isinstance(site, Site) for note in site.notes]
    found += [
        f"site '{site.name}' does not draw {' or '.join(map(repr, site.undrawn))}: "
        f"{'it is' if len(site.undrawn) == 1 else 'they are'} in none of its {site.size} masks, and in those "
        "of other sites. It is left out of the site's loss and scores; if it is looked for there and absent, "
        "say so by `absent: background` in task.yaml"
        for site in sites
        if isinstance(site, Site) and site.undrawn
    ]
    found += [
        f"site '{site.name}' validates on {few}: its validation scores say little of other patients"
        for site in sites
        if (few := few_patients(site.counts.patients.get("val", 0)))
        and sum(site.counts.patients.values()) > 1
    ]
    found += [
        f"site '{site.name}' has one patient, on which it trains and validates: its scores say nothing of "
        "other patients; add patients, or leave the site out"
        for site in sites
        if sum(site.counts.patients.values()) == 1
    ]
    return found


def shortened(notes: Sequence[str]) -> list[str]:
    """The first note, with the number of the others like it."""
    if len(notes) < 2:
        return [*notes]
    return [f"{notes[0]}; and {len(notes) - 1} more such notes on the site's files"]


def untrainable(root: Path, problems: Sequence[str]) -> FederationError:
    """The error of a folder with these problems."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return FederationError(f"{root} is not a federation that can be trained on ({count}):", problems)
