"""Where the versions of a store are kept: in a `Folder`, or in a `Bucket` of an S3 service."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from model_store.artefact import Artefact

# Returns the number of the version that has the content already, if there is one.
Earlier = Callable[[], int | None]


@dataclass(frozen=True, slots=True)
class Listed:
    """The version numbers of a name, ascending, and those of them that have a tombstone."""

    numbers: tuple[int, ...] = ()
    withdrawn: frozenset[int] = frozenset()

    def __contains__(self, number: int) -> bool:
        place = bisect_left(self.numbers, number)
        return place < len(self.numbers) and self.numbers[place] == number


NOTHING = Listed()


class Backend(Protocol):
    """The versions of a store, by name and number. Safe for many processes at once.

    `listed` and `survey` show what any process had published or withdrawn at the instant `since`
    (`time.monotonic`), and return the same object as long as nothing changed. What was put into the store by
    hand, without this package, is seen at once in a name, and within a second in the survey of a large store.
    """

    @property
    def root(self) -> Path | str:
        """The folder, or the bucket's URL."""

    @property
    def index(self) -> Path:
        """The file of the store's `Index`."""

    def check(self) -> None:
        """Raise OSError or StoreUnavailable if versions cannot be read."""

    def prepare(self) -> None:
        """Raise OSError or StoreError if a version could not be published."""

    def survey(self, since: float, *, thorough: bool = False) -> Mapping[str, Listed]:
        """List every name that has a version; `thorough` shows at once what was put there by hand, too.

        Raises StoreUnavailable.
        """

    def listed(self, name: str, since: float) -> Listed:
        """List the versions of a name, also damaged and withdrawn ones; none for an unknown name."""

    def tell(self) -> None:
        """Let other processes know that a version was published or withdrawn."""

    def artefact(self, name: str, number: int) -> Artefact:
        """Read and check a version's manifest. Raises ArtefactDamaged, UnknownKind."""

    def publish(
        self, name: str, files: Mapping[str, bytes], earlier: Earlier, admit: Callable[[], None] | None
    ) -> int:
        """Make `files` the next version, all at once, and return its number.

        If `earlier` finds the content, return that version. No other version of the name appears between
        `earlier`, which is called first, `admit`, which is called last, and the moment at which this one is
        visible; where one did, both are called again.
        """

    def restore(self, artefact: Artefact, files: Mapping[str, bytes]) -> None:
        """Write those of a version's files again that are missing or not as published."""

    def attached(self, name: str, number: int, file: str) -> bytes | None:
        """Read a file that was attached to a version, if it was."""

    def is_attached(self, name: str, number: int, file: str) -> bool:
        """Return whether a file was attached to a version, without reading it."""

    def attach(self, name: str, number: int, file: str, content: bytes) -> None:
        """Write a file beside a version's manifest, which does not name it. It may be replaced."""

    def tombstone(self, name: str, number: int, since: float) -> bytes | None:
        """Read the tombstone of a version, if it had one at `since`. Raises OSError."""

    def bury(self, name: str, number: int, tombstone: bytes) -> None:
        """Write the tombstone of a version."""

    def prune(self, withdrawn: Sequence[Artefact]) -> list[str]:
        """Delete what no version refers to, and the files of the withdrawn ones, without their manifests.

        Returns what was deleted.
        """
