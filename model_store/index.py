"""Index of a store: from a digest, a name or a number to the version, without reading every manifest.

    ROOT/.index     a line for each version with a manifest that was read; it only grows

A line saves reading a manifest, and is never the truth: which versions there are and which of them were
withdrawn, the backend lists; what is opened is read from its manifest, and corrects a line that differs. So a
missing, torn, outdated or unwritable index costs time and changes no answer. For a bucket, the file is in the
cache of this machine.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

from model_store.artefact import Artefact
from model_store.backend import Backend, Listed
from model_store.errors import ArtefactDamaged, UnknownKind

# Manifests in memory: some 10 kB each.
_MOST_MANIFESTS = 4096
_MOST_ABSENT = 4096
# A digest that was looked for in vain is not looked for in the whole store by every scan.
_ABSENT_S = 1.0
# A version that could not be read is tried again after so long, or when its name has changed.
_REPAIRED_S = 1.0
# So many manifests are read rather than the whole file.
_MANY = 50
# So many versions are looked for in the text of the file before all of it is parsed.
_MOST_SOUGHT = 8


class Record(NamedTuple):
    """What listings and lineage need of a version. `published` is in seconds since 1970 (UTC).

    `run` is the run or the job that made it. `made_of` has the digests of its parts and parents, separated by
    spaces: a tuple of plain values costs the garbage collector nothing.
    """

    name: str
    number: int
    digest: str
    part_of: str | None
    adapted_to: str | None
    run: str
    published: float
    made_of: str

    def __str__(self) -> str:
        return f"{self.name}@{self.number}"

    @property
    def ancestors(self) -> list[str]:
        """The digests of its parts and parents."""
        return self.made_of.split()

    @classmethod
    def of(cls, artefact: Artefact) -> Record:
        """The record of a version that was read."""
        manifest = artefact.manifest
        return cls(
            artefact.name,
            artefact.version,
            artefact.digest,
            manifest.part_of,
            manifest.adapted_to,
            manifest.lineage.run,
            artefact.published.timestamp(),
            " ".join(sorted(artefact.ancestors())),
        )

    def to_line(self) -> bytes:
        """One line of the file, without its end."""
        return json.dumps(self, separators=(",", ":")).encode()


_TYPES = frozenset(product([str], [int], [str], *[[str, type(None)]] * 2, [str], [float], [str]))
_TOGETHER = 200


class Index:
    """Records and manifests of a store's versions, shared by the threads of a process."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock, self._filling = threading.RLock(), threading.Lock()
        self._records: dict[tuple[str, int], Record] = {}
        self._by_digest: dict[str, Record] = {}
        # Read from manifests, and not yet in the file.
        self._unsaved: list[Record] = []
        # Lines of the file that were not parsed, each after a line's end: a job needs few of them.
        self._text, self._sought, self._is_parsed = b"", 0, False
        self._read_up_to = 0
        self._file: int | None = None
        # Manifests never change; the least recently used go first.
        self._manifests: OrderedDict[tuple[str, int], Artefact] = OrderedDict()
        self._absent: OrderedDict[str, float] = OrderedDict()
        # The listing of each name of which every readable version has a record.
        self._indexed: dict[str, Listed] = {}
        self._surveyed: Mapping[str, Listed] | None = None
        self._complete: tuple[Record, ...] = ()
        self._shared: tuple[str, ...] = ()
        # What was made directly of each version, and the records by which that was found.
        self._children: tuple[tuple[Record, ...], dict[str, list[Record]]] = ((), {})
        self._read_again = math.inf

    # ------------------------------------------------------------------ one version

    def artefact(self, name: str, number: int) -> Artefact:
        """Read a version's manifest, once. Raises ArtefactDamaged, UnknownKind."""
        key = (name, number)
        with self._lock:
            found = self._manifests.get(key)
            if found is not None:
                self._manifests.move_to_end(key)
                return found
        artefact = self._backend.artefact(name, number)
        with self._lock:
            self._manifests[key] = artefact
            if len(self._manifests) > _MOST_MANIFESTS:
                self._manifests.popitem(last=False)
            known = self._records.get(key)
            if known is None or known.digest != artefact.digest:
                self._add(Record.of(artefact))
        return artefact

    def record(self, name: str, number: int) -> Record | None:
        """The record of a version; None if its manifest cannot be read."""
        found = self._records.get((name, number))
        if found is None:
            with self._lock:
                self._parse_rest()
            found = self._records.get((name, number))
        if found is None:
            with suppress(ArtefactDamaged, UnknownKind):
                self.artefact(name, number)
            found = self._records.get((name, number))
        return found

    def find(self, digest: str, since: float, *, thorough: bool = True) -> Record | None:
        """Find the version with a digest; None if there is none.

        Without `thorough`, a version that was copied into the store by hand may be found a second late.
        """
        found = self._there(digest, since)
        if found is not None:
            return found
        self._seek(digest)
        found = self._there(digest, since)
        if found is not None:
            return found
        now = time.monotonic()
        if not thorough and now - self._absent.get(digest, -_ABSENT_S) < _ABSENT_S:
            return None
        self.complete(since, thorough=thorough)
        found = self._there(digest, since)
        if found is None:
            with self._lock:
                self._absent[digest] = now
                self._absent.move_to_end(digest)
                if len(self._absent) > _MOST_ABSENT:
                    self._absent.popitem(last=False)
        return found

    def of(self, name: str, numbers: Sequence[int], sought: str) -> list[Record]:
        """Records of versions of a name, by number, among them each with `sought` as its digest or its run.

        One without a readable manifest has none. In a long name, most that are not sought are left out.
        """
        if len(numbers) <= _MANY:
            return [record for number in numbers if (record := self.record(name, number)) is not None]
        self._seek(sought)
        with self._lock:
            unknown = set(numbers) - self._lined(name) if self._text else numbers
        for number in unknown:
            self._fill(name, number)
        records = self._records
        return [record for number in numbers if (record := records.get((name, number))) is not None]

    def _there(self, digest: str, since: float) -> Record | None:
        found = self._by_digest.get(digest)
        if found is None or found.number not in self._backend.listed(found.name, since):
            return None
        return found

    # ------------------------------------------------------------------ all versions

    def complete(self, since: float, *, thorough: bool = False) -> tuple[Record, ...]:
        """Records of every readable version, by name and number; the same object while nothing changed."""
        surveyed = self._backend.survey(since, thorough=thorough)
        # The first time, it reads every manifest without a line: requests for one version go on.
        with self._filling:
            if surveyed is self._surveyed and time.monotonic() < self._read_again:
                return self._complete
            self.load()
            unread = False
            for name, listed in surveyed.items():
                if self._indexed.get(name) is not listed:
                    whole = False not in {self._fill(name, number) for number in listed.numbers}
                    unread |= not whole
                    if whole:
                        self._indexed[name] = listed
            self._save()
            records = self._records
            found = tuple(
                record
                for name in sorted(surveyed)
                for number in surveyed[name].numbers
                if (record := records.get((name, number))) is not None
            )
            if found != self._complete:
                self._complete = found
                offered = {each.name for each in found if each.part_of is None and each.adapted_to is None}
                self._shared = tuple(sorted(offered))
                with self._lock:
                    # A version may have been copied: the first one of a digest is found.
                    self._by_digest = {record.digest: record for record in reversed(found)}
            self._surveyed = surveyed
            self._read_again = time.monotonic() + _REPAIRED_S if unread else math.inf
            return self._complete

    def shared(self, since: float) -> tuple[str, ...]:
        """Names with a version that is neither a part nor adapted to a hospital, sorted."""
        self.complete(since)
        return self._shared

    def children(self, since: float) -> Mapping[str, Sequence[Record]]:
        """Records of what was composed or made directly of each version, by the digest of that version."""
        complete = self.complete(since)
        records, children = self._children
        if records is not complete:
            children = {}
            for record in complete:
                for ancestor in record.ancestors:
                    children.setdefault(ancestor, []).append(record)
            self._children = complete, children
        return children

    def _fill(self, name: str, number: int) -> bool:
        """Read the record of a version without one; return whether it has one."""
        if (name, number) not in self._records:
            try:
                record = Record.of(self._backend.artefact(name, number))
            except (ArtefactDamaged, UnknownKind):
                return False
            self._add(record)
        return True

    # ------------------------------------------------------------------ the file

    def published(self, artefact: Artefact) -> None:
        """Add a version that this process published, and let the other processes know."""
        with self._lock:
            self._add(Record.of(artefact))
            self._manifests[artefact.name, artefact.version] = artefact
        self._save()

    def _add(self, record: Record) -> None:
        """Add what was read from a manifest."""
        with self._lock:
            if self._put(record):
                self._unsaved.append(record)

    def _put(self, record: Record) -> bool:
        """Replace what is known of a version; return whether it differed."""
        key = (record.name, record.number)
        known = self._records.get(key)
        if known is not None and known.digest == record.digest:
            return False
        if known is not None:
            self._by_digest.pop(known.digest, None)
            self._surveyed = None
        self._records[key] = record
        self._by_digest.setdefault(record.digest, record)
        return True

    def load(self) -> None:
        """Read the lines that were added to the file since."""
        with self._lock:
            self._read()
            self._parse_rest()

    def _read(self) -> None:
        with suppress(OSError), self._backend.index.open("rb") as file:
            about = os.fstat(file.fileno())
            if about.st_ino != self._file or about.st_size < self._read_up_to:
                self._file, self._read_up_to = about.st_ino, 0
            if about.st_size == self._read_up_to:
                return
            file.seek(self._read_up_to)
            content = file.read()
            # A line that is being written has no end yet.
            content = content[: content.rfind(b"\n") + 1]
            self._read_up_to += len(content)
            self._text = b"".join((self._text or b"\n", content))

    def _parse_rest(self) -> None:
        text, self._text = self._text, b""
        if not text:
            return
        records = _parse(text)
        if self._is_parsed:
            self._learn(records)
            return
        self._is_parsed = True
        known = self._records
        self._records = {(record.name, record.number): record for record in records}
        self._by_digest = {record.digest: record for record in reversed(records)}
        for key, record in known.items():
            if key in self._manifests or key not in self._records:
                self._put(record)

    def _seek(self, sought: str) -> None:
        """Read the lines with a digest or a run; all of them, once enough were looked for.

        Parsing 20,000 lines takes 40 ms, and finding one of them 1 ms.
        """
        with self._lock:
            self._read()
            self._sought += 1
            if self._is_parsed or self._sought > _MOST_SOUGHT:
                self._parse_rest()
                return
            # Neither is the last field, which has the digests of other versions.
            field = json.dumps(sought).encode() + b","
            lines, text, at = [], self._text, self._text.find(field)
            while at >= 0:
                end = text.index(b"\n", at)
                lines.append(text[text.rindex(b"\n", 0, at) + 1 : end])
                at = text.find(field, end)
            records = _parse(b"\n".join(lines))
            self._learn(records)
            if len(records) < len(lines):
                # A line was half written: which versions have one, parsing tells.
                self._parse_rest()

    def _lined(self, name: str) -> set[int]:
        """Numbers of a name with a whole line in the text."""
        start = re.escape(b"\n[" + json.dumps(name).encode() + b",")
        whole = start + rb'(\d+),"sha256:[0-9a-f]{64}",[^\n]*[0-9a-f"]"\](?=\n)'
        return {*map(int, re.findall(whole, self._text))}

    def _learn(self, records: Sequence[Record]) -> None:
        """Add what was read from the file; a manifest that was read counts more."""
        for record in records:
            if (record.name, record.number) not in self._manifests:
                self._put(record)

    def _save(self) -> None:
        with self._lock:
            unsaved, self._unsaved = self._unsaved, []
        if unsaved:
            append(self._backend.index, b"".join(record.to_line() + b"\n" for record in unsaved))


def append(path: Path, content: bytes) -> None:
    """Add whole lines at the end of an index, if it can be written: it may be on a read-only disk."""
    with suppress(OSError), path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if file.tell() == 0:
            # Who may publish into the folder, may add to its index.
            path.chmod(path.parent.stat().st_mode & 0o666)
        # An empty line before ends what a killed process left half written.
        file.write(b"\n" + content)


def _parse(content: bytes) -> list[Record]:
    lines = [line for line in content.split(b"\n") if line]
    make = partial(tuple.__new__, Record)
    found: list[Record] = []
    # Many at once are several times faster than one by one, all at once keep the garbage collector busy.
    for start in range(0, len(lines), _TOGETHER):
        some = lines[start : start + _TOGETHER]
        try:
            found += [make(fields) for fields in json.loads(b"[" + b",".join(some) + b"]") if _fits(fields)]
        except ValueError:
            for line in some:
                with suppress(ValueError):
                    found += [make(fields) for fields in [json.loads(line)] if _fits(fields)]
    return found


def _fits(fields: object) -> bool:
    return type(fields) is list and tuple(map(type, fields)) in _TYPES
