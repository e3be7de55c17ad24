"""One hospital's data in memory, by split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Generic

from typing_extensions import TypeVar

from model_store.errors import LocumStoreError
from model_store.guard import ReferenceStatistics, summarise
from model_store.scan import Scan
from model_store.task import Task
from training.data.cases import Site
from training.errors import FederationError
from training.local.data import Data
from training.local.masks import told_by
from training.local.registry import kind_of

AnyData = TypeVar("AnyData", bound=Data, default=Data, covariant=True)


@dataclass(frozen=True)
class SiteData(Generic[AnyData]):
    """One hospital's examples by split, and the intensity statistics of its training scans.

    A site without validation patients of its own validates on those that it trains on: `val` is then
    `all_train`. `test` may be empty. `unfiltered` has every training example, where those without foreground
    are left out of `train`.
    """

    site: str
    train: AnyData
    val: AnyData
    test: AnyData
    statistics: ReferenceStatistics | None
    unfiltered: AnyData | None = None

    @property
    def all_train(self) -> AnyData:
        """Every training example, whatever its target: what a network meets when it serves."""
        return self.train if self.unfiltered is None else self.unfiltered

    @property
    def images(self) -> int:
        """The number of training examples, which a site announces before the first round."""
        return len(self.all_train)

    @property
    def scored(self) -> int | None:
        """The most that a score can count, if that is not the number of cases; it is announced, too."""
        return self.val.scored

    @property
    def held_out(self) -> bool:
        """Whether `val` has patients that are not trained on."""
        return self.val is not self.all_train

    @classmethod
    def load(cls, site: Site[Any], task: Task, *, keep_empty: bool = True) -> SiteData[Any]:
        """Decode and prepare a site, with the preprocessing that serving uses. Every case must have a split.

        `keep_empty=False` drops examples without foreground from training (not from validation and testing),
        unless none would remain. Statistics are computed over the training scans only, and are None without
        any. Raises FederationError naming the file that cannot be prepared.
        """
        statistics: list[ReferenceStatistics] = []
        read = kind_of(task).reader(task)
        all_train = _prepared(site, site.of_split("train"), task, read, statistics)
        val = _prepared(site, site.of_split("val"), task, read)
        test = _prepared(site, site.of_split("test"), task, read)
        merged = reduce(ReferenceStatistics.merge, statistics) if statistics else None
        if (told := told_by(task, site.undrawn)) is not None:
            all_train, val, test = (replace(each, told=told) for each in (all_train, val, test))
        train = all_train if keep_empty else all_train.with_foreground()
        unfiltered = None if train is all_train else all_train
        return cls(site.name, train, val if len(val) else all_train, test, merged, unfiltered)


def _prepared(
    site: Site[Any],
    cases: Sequence[Any],
    task: Task,
    read: Callable[[Any], Scan],
    statistics: list[ReferenceStatistics] | None = None,
) -> Any:
    """Prepare `cases`, in order, and append each scan's statistics to `statistics`."""
    kind, found = kind_of(task), []
    for case in cases:
        try:
            scan = read(case)
            examples, prepared = kind.of_case(case, scan, task)
            if statistics is not None:
                statistics.append(ReferenceStatistics.of(summarise(scan, prepared)))
        except LocumStoreError as error:
            raise FederationError(
                f"site '{site.name}' cannot be loaded:", [f"{site.name}/{case.name}: {error}"]
            ) from error
        found.append(examples)
    return kind.joined(found, task)
