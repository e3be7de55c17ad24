"""The versions of a store: which there are, what each is, and what each descends from.

Everything here is as one caller sees it at one instant (`View`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from pydantic import BaseModel, ValidationError

from model_store.artefact import Artefact
from model_store.backend import Backend, Listed
from model_store.errors import ArtefactDamaged, ReferenceNotFound, StoreError, UnknownKind
from model_store.index import Index, Record
from model_store.signatures import Signatures

_MOST_NAMED = 20


class Tombstone(BaseModel):
    """Why, by whom and when (UTC) a version was withdrawn."""

    actor: str
    reason: str
    time: datetime


@dataclass(frozen=True)
class Version:
    """One version in a listing. `flagged` has the withdrawn artefacts (`name@version`) it descends from."""

    artefact: Artefact
    withdrawn: Tombstone | None
    flagged: tuple[str, ...]


@dataclass(frozen=True)
class View:
    """What one caller sees of a backend, and when.

    Attributes:
        sees: whether the caller may see what was adapted to a hospital; None sees everything.
        since: the instant (`time.monotonic`) at which the store is seen; None sees it as it is at each call.
    """

    backend: Backend
    sees: Callable[[str], bool] | None = None
    since: float | None = None

    @property
    def instant(self) -> float:
        """The instant at which the store is seen."""
        return time.monotonic() if self.since is None else self.since

    def hides(self, hospital: str | None) -> bool:
        """Whether what was adapted to this hospital is hidden; None is adapted to none."""
        return hospital is not None and self.sees is not None and not self.sees(hospital)

    def listed(self, name: str) -> Listed:
        """The versions of a name, hidden ones included, and which of them were withdrawn."""
        return self.backend.listed(name, self.instant)

    def is_withdrawn(self, name: str, number: int) -> bool:
        """Whether a version has a tombstone."""
        # An unreadable tombstone is one, too.
        with suppress(OSError):
            return self.backend.tombstone(name, number, self.instant) is not None
        return True


class Lineage:
    """Where versions come from: records of all readable ones, from the index."""

    def __init__(self, view: View, index: Index) -> None:
        self._view, self._index = view, index

    def records(self) -> list[Record]:
        """List what lineage needs of every readable version, by name and number."""
        found = self._index.complete(self._view.instant)
        if self._view.sees is None:
            return list(found)
        return [each for each in found if not self._view.hides(each.adapted_to)]

    def locate(self, digest: str, *, thorough: bool = True) -> Record | None:
        """Find the version with this digest, withdrawn or not; None if there is none.

        Without `thorough`, one that was copied into the store by hand may be found a second late.
        """
        record = self._index.find(digest, self._view.instant, thorough=thorough)
        return None if record is None or self._view.hides(record.adapted_to) else record

    def flagged(self, artefact: Artefact) -> tuple[str, ...]:
        """List the withdrawn artefacts (`name@version`) that an artefact descends from."""
        reached: dict[str, Record] = {}
        seen: set[str] = set()
        left = [*artefact.ancestors()]
        while left:
            digest = left.pop()
            if digest in seen:
                continue
            seen.add(digest)
            record = self.locate(digest, thorough=False)
            if record is not None:
                reached[digest] = record
                left += record.ancestors
        return tuple(
            str(record)
            for record in sorted(reached.values(), key=lambda each: (each.name, each.number))
            if self._view.is_withdrawn(record.name, record.number)
        )

    def descendants(self, digest: str) -> list[Record]:
        """List every artefact composed of or made from the one with this digest, transitively."""
        children = self._index.children(self._view.instant)
        found: list[Record] = []
        reached, left = {digest}, [digest]
        while left:
            for child in children.get(left.pop(), ()):
                if child.digest not in reached and not self._view.hides(child.adapted_to):
                    reached.add(child.digest)
                    left.append(child.digest)
                    found.append(child)
        return sorted(found, key=lambda each: (each.name, each.number))


class Versions:
    """Versions by name and number: damaged and withdrawn ones are listed, and can be looked at."""

    def __init__(self, view: View, index: Index, lineage: Lineage, signatures: Signatures) -> None:
        self._view, self._index = view, index
        self._lineage, self._signatures = lineage, signatures

    def names(self) -> list[str]:
        """List the names that have a version, sorted."""
        surveyed = self._view.backend.survey(self._view.instant)
        if self._view.sees is None:
            return list(surveyed)
        return [name for name, listed in surveyed.items() if self._visible(name, listed.numbers)]

    def shared(self) -> tuple[str, ...]:
        """List the names with a version that is neither a part nor adapted to a hospital, sorted."""
        return self._index.shared(self._view.instant)

    def numbers(self, name: str) -> list[int]:
        """List the version numbers of a name, also damaged and withdrawn ones; empty for an unknown name."""
        return self._visible(name, self._view.listed(name).numbers)

    def get(self, name: str, number: int) -> Version:
        """Look at one version, withdrawn or not.

        Raises:
            ReferenceNotFound: it is not in the store.
            ArtefactDamaged, UnknownKind: its manifest or its tombstone cannot be read.
        """
        if number not in self.numbers(name):
            raise ReferenceNotFound(f"'{name}@{number}' is not in the store")
        artefact = self.artefact(name, number)
        return Version(artefact, self.tombstone(name, number), self._lineage.flagged(artefact))

    def of(self, name: str) -> list[Version]:
        """List every readable version of a name, oldest first, including withdrawn ones.

        Raises ReferenceNotFound for an unknown name, and the first version's error if no version is readable.
        """
        found, unreadable = [], []
        for number in self._known(name):
            try:
                found.append(self.get(name, number))
            except StoreError as error:
                unreadable.append(error)
        if not found:
            raise unreadable[0]
        return found

    def newest(self, name: str) -> tuple[Version, bool, bool, Record]:
        """Look at the version that `name` alone opens, else at the newest readable one.

        Returns:
            (version, whether it opens, whether no trusted key signed one that is newer or this one,
            record of the newest readable version).

        Raises ReferenceNotFound for an unknown name, and the newest version's error if none is readable.
        """
        numbers, withdrawn = self._known(name), self._view.listed(name).withdrawn
        last: tuple[Version, Record] | None = None
        untrusted = False
        errors: list[StoreError] = []
        for number in reversed(numbers):
            if last is not None and number in withdrawn:
                continue
            try:
                version = self.get(name, number)
            except StoreError as error:
                errors.append(error)
                continue
            last = last or (version, Record.of(version.artefact))
            if version.withdrawn is not None:
                continue
            if self._signatures.trusts(version.artefact):
                return version, True, untrusted, last[1]
            untrusted = True
        if last is None:
            raise errors[0]
        return last[0], False, untrusted, last[1]

    def unreadable(self, name: str, numbers: Sequence[int] | None = None) -> dict[int, StoreError]:
        """Map each version with an unreadable manifest or tombstone to its error. Listings leave it out.

        `numbers` are the versions to look at, all of them when None.
        """
        found: dict[int, StoreError] = {}
        for number in self.numbers(name) if numbers is None else numbers:
            try:
                self.artefact(name, number)
                self.tombstone(name, number)
            except StoreError as error:
                found[number] = error
        return found

    def find(self, name: str, digest: str) -> Artefact | None:
        """The readable version of a name with this digest, withdrawn or not, unverified; None without one."""
        record = self._lineage.locate(digest)
        with suppress(ArtefactDamaged, UnknownKind):
            return None if record is None or record.name != name else self.artefact(name, record.number)
        return None

    def made_by(self, name: str, run: str) -> Artefact | None:
        """Find the first version of a name that this run, or this job, made, withdrawn or not."""
        for record in self.sought(name, run):
            if record.run == run:
                return self.artefact(name, record.number)
        return None

    def artefact(self, name: str, number: int) -> Artefact:
        """Read a version's manifest, withdrawn or not, unverified.

        Raises ArtefactDamaged, UnknownKind, and ReferenceNotFound for a hidden one.
        """
        artefact = self._index.artefact(name, number)
        # The index may have been of another content: what was just read counts.
        if self._view.hides(artefact.manifest.adapted_to):
            raise ReferenceNotFound(f"'{name}@{number}' is not in the store")
        return artefact

    def tombstone(self, name: str, number: int) -> Tombstone | None:
        """Read the tombstone of a version; None if it was not withdrawn.

        Raises ArtefactDamaged if the tombstone cannot be read.
        """
        try:
            content = self._view.backend.tombstone(name, number, self._view.instant)
            return None if content is None else Tombstone.model_validate_json(content)
        except (OSError, ValidationError) as error:
            raise ArtefactDamaged(
                f"{name}@{number}: its tombstone {number}.withdrawn.json cannot be read "
                f"({type(error).__name__}): restore that file, or remove it and withdraw the version again"
            ) from error

    def sought(self, name: str, sought: str) -> list[Record]:
        """Records of readable versions, each with the digest or the run that is sought among them.

        One damaged manifest must not make the whole store unusable.
        """
        return self._index.of(name, self.numbers(name), sought)

    def _known(self, name: str) -> list[int]:
        numbers = self.numbers(name)
        if not numbers:
            raise ReferenceNotFound(f"'{name}' is not in the store; names: {some(self.names()) or 'none'}")
        return numbers

    def _visible(self, name: str, numbers: Sequence[int]) -> list[int]:
        if self._view.sees is None:
            return list(numbers)
        hidden, readable = set(), set()
        for number in numbers:
            record = self._index.record(name, number)
            if record is not None:
                readable.add(number)
                if self._view.hides(record.adapted_to):
                    hidden.add(number)
        return [n for n in numbers if n not in hidden] if readable - hidden else []


def some(names: Sequence[str]) -> str:
    """Name the last of them, for a message: a store may have thousands."""
    shown = ", ".join(names[-_MOST_NAMED:])
    return shown if len(names) <= _MOST_NAMED else f"{len(names)}, the last of them {shown}"
