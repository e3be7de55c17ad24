"""Data classes of a federation: its sites, and the cases of a site."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, Literal

from typing_extensions import TypeVar

from model_store.task import Task

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")


@dataclass(frozen=True)
class Case:
    """One image and its mask. `split` is None until cases.csv or `split_by_patient` sets it."""

    image: Path
    mask: Path
    patient: str
    split: Split | None = None

    @property
    def name(self) -> str:
        """The name of the image's file or folder."""
        return self.image.name


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
class Site(Generic[AnyCase]):
    """One hospital: its name (that of the folder) and its cases, ordered by file name."""

    name: str
    cases: tuple[AnyCase, ...]

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
class Federation(Generic[AnyCase]):
    """The sites of one task.

    `inferred` says that no task was given and `task` was inferred from the data. `digest` is a sha256 over
    the task, the names, the patients and the bytes of all files: two federations with equal digests train
    identically. Each group in `repeated` names images (`SITE/images/FILE`) with identical bytes that belong
    to different patients.
    """

    root: Path
    task: Task
    sites: tuple[Site[AnyCase], ...]
    inferred: bool
    digest: str
    repeated: tuple[tuple[str, ...], ...] = ()

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
