"""What a federation is made of: sites, and a site's cases."""

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
    """One image and its mask. `split` is None until cases.csv or `split_by_patient` says it."""

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
    """One image or volume of one class. `label` is the class's index, `name` unique within the site.

    An image of an .npz is `row` (the array's name and the index in it) of the file `image`.
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
    """One hospital: its name (the folder's) and its cases, ordered by file name."""

    name: str
    cases: tuple[AnyCase, ...]

    @property
    def patients(self) -> tuple[str, ...]:
        """Every patient once, sorted."""
        return tuple(sorted({case.patient for case in self.cases}))

    def of_split(self, split: Split) -> tuple[AnyCase, ...]:
        """The cases of one split."""
        return tuple(case for case in self.cases if case.split == split)

    def assigned(self, splits: dict[str, Split]) -> Site[AnyCase]:
        """The same site with the split of every case taken from its patient's."""
        return replace(self, cases=tuple(replace(case, split=splits[case.patient]) for case in self.cases))


@dataclass(frozen=True)
class Federation(Generic[AnyCase]):
    """The sites of one task.

    `inferred` says that no task was given and this one was read off the data. `digest` is a sha256 over the
    task, the names, the patients and the bytes of all files: two federations with one digest train alike.
    `repeated` names images (`SITE/images/FILE`), each group being the same bytes at more than one patient.
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
        """The site of that name. Raises KeyError."""
        for site in self.sites:
            if site.name == name:
                return site
        raise KeyError(f"no site '{name}' in {self.root}; there are {', '.join(self.names)}")

    def only(self, names: Iterable[str]) -> Federation[AnyCase]:
        """The same federation with some of its sites (the digest stays that of the whole folder)."""
        kept = set(names)
        return replace(self, sites=tuple(site for site in self.sites if site.name in kept))
