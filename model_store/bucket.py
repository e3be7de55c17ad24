"""Versions in a bucket of an S3 service, for processes that share no disk.

URL/content/HEX/manifest.json       a version's files, by the manifest's digest; nothing refers to them yet
URL/versions/NAME/3                 makes them version 3: its content is the digest
URL/versions/NAME/3.withdrawn.json  its tombstone, if it was withdrawn
URL/changed                         another content after every change, by which others see that there was one

A version is published by one conditional write (`If-None-Match: *`) of `versions/NAME/3`: the first publisher
has the number, and the others look again. Files are kept in a local cache of bounded size, and
verified when they are fetched. Nothing is listed again while `changed` is the same, which one small request
tells; but what another program put into the bucket is seen a second later, in a survey of a large bucket
after a few seconds.

Address and credentials come from the environment, as AWS's own tools read it: AWS_ENDPOINT_URL, AWS_REGION,
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store

from model_store.artefact import DIGEST_FILE, MANIFEST, Artefact
from model_store.backend import NOTHING, Earlier, Listed
from model_store.durable import write_durably
from model_store.errors import ArtefactDamaged, PublishRefused, StoreUnavailable
from model_store.manifest import BaseManifest
from model_store.reference import NAME

MOST_CACHED = 10 * 2**30
# What another program wrote is looked for after so long; a survey may take a twentieth of the time.
_FRESH_S = 1.0
_SHARE = 20
# A file of the cache that was asked for so recently may be open somewhere.
_IN_USE_S = 600.0
# Content that nothing refers to yet: its publisher may still be writing.
_ABANDONED = timedelta(hours=1)
_TIMEOUT = timedelta(seconds=30)
_RETRIES = 3


def connect(url: str) -> S3Store:
    """The objects below s3://BUCKET/PREFIX. Raises obstore's BaseError."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
    return S3Store.from_url(
        url,
        client_options={"allow_http": endpoint.startswith("http://"), "timeout": _TIMEOUT},
        retry_config={"max_retries": _RETRIES, "retry_timeout": _TIMEOUT},
    )


@dataclass(frozen=True, slots=True)
class _Seen:
    """A listing, the state of the bucket before it was made, and when that was (`time.monotonic`)."""

    listed: Listed
    state: str | None
    at: float


class Bucket:
    """A `Backend` in a bucket. `cache` is a folder of this machine, which processes may share."""

    def __init__(self, url: str, cache: Path, most_cached: int = MOST_CACHED) -> None:
        self.root = url.rstrip("/")
        self._cache, self._most_cached = cache, most_cached
        self.index = cache / f"index-{hashlib.sha256(self.root.encode()).hexdigest()[:16]}"
        self._lock = threading.Lock()
        self._seen: dict[str, _Seen] = {}
        self._times: dict[tuple[str, int], datetime] = {}
        self._survey: dict[str, Listed] = {}
        # As of the survey: the state of the bucket, when it began and how long it took.
        self._surveyed: tuple[str | None, float, float] | None = None
        self._state: tuple[str | None, float] | None = None
        self._digests: dict[tuple[str, int], str] = {}
        self._conditional = False
        with self._asking():
            self._objects = connect(self.root)

    def check(self) -> None:
        """Ask for a version, without an answer from memory."""
        with self._asking():
            next(iter(obstore.list(self._objects, "versions/", chunk_size=1)), None)

    def prepare(self) -> None:
        """Refuse a service that overwrites where it is asked not to: two could publish one number."""
        if self._conditional:
            return
        if self._create("probe", b"") and self._create("probe", b""):
            raise PublishRefused(
                f"{self.root}: this S3 service ignores 'If-None-Match: *' and would let two publishers write "
                "one version; use a service that supports conditional writes"
            )
        self._conditional = True

    def survey(self, since: float, *, thorough: bool = False) -> Mapping[str, Listed]:
        """List every name that has a version."""
        state = self._changed(since)
        with self._lock:
            began = time.monotonic()
            if self._surveyed is not None:
                known, at, cost = self._surveyed
                if not thorough and known == state and began - at < max(_FRESH_S, _SHARE * cost):
                    return self._survey
            found = {name: self._remember(name, listed, state, began) for name, listed in self._list("")}
            self._surveyed = (state, began, time.monotonic() - began)
            if found != self._survey:
                self._survey = found
            return self._survey

    def listed(self, name: str, since: float) -> Listed:
        """List the versions of a name."""
        state = self._changed(since)
        began = time.monotonic()
        seen = self._seen.get(name)
        if seen is not None and seen.state == state and began - seen.at < _FRESH_S:
            return seen.listed
        return self._relist(name, state, began)

    def tell(self) -> None:
        """Write `changed`."""
        self._put(_CHANGED, uuid.uuid4().bytes)

    def artefact(self, name: str, number: int) -> Artefact:
        """Read and check a version's manifest, from the cache if it is there as published."""
        digest = self._digest(name, number)
        folder = self._cache / digest.removeprefix("sha256:")
        with suppress(ArtefactDamaged):
            return Artefact.read_from(folder, name, number, self)
        content = self._get(_content(digest, MANIFEST))
        self._keep(folder / DIGEST_FILE, digest.encode())
        # Last: with it the folder is a version's.
        self._keep(folder / MANIFEST, content)
        if (name, number) not in self._times:
            self._relist(name)
        published = self._times[name, number].timestamp()
        os.utime(folder / MANIFEST, (published, published))
        return Artefact.read_from(folder, name, number, self)

    def publish(
        self, name: str, files: Mapping[str, bytes], earlier: Earlier, admit: Callable[[], None] | None
    ) -> int:
        """Write the files, then claim the next number for them."""
        self.prepare()
        digest = files[DIGEST_FILE]
        written = False
        while True:
            listed = self._relist(name)
            found = earlier()
            if found is not None:
                return found
            if not written:
                for file, data in files.items():
                    self._put(_content(digest.decode(), file), data)
                written = True
                continue  # equal content may have been published meanwhile
            number = max(listed.numbers, default=0) + 1
            if admit is not None:
                admit()
            if self._create(_version(name, number), digest):
                return number

    def restore(self, artefact: Artefact, files: Mapping[str, bytes]) -> None:
        """Write a version's files again: to compare them would be to read as much."""
        for file, data in files.items():
            self._put(_content(artefact.digest, file), data)

    def attached(self, name: str, number: int, file: str) -> bytes | None:
        """Read a file that was attached to a version, if it was."""
        with self._asking():
            try:
                path = _content(self._digest(name, number), file)
                return bytes(obstore.get(self._objects, path).bytes())
            except FileNotFoundError:
                return None

    def is_attached(self, name: str, number: int, file: str) -> bool:
        """Return whether a file was attached to a version, without reading it."""
        with self._asking():
            try:
                obstore.head(self._objects, _content(self._digest(name, number), file))
            except FileNotFoundError:
                return False
            return True

    def attach(self, name: str, number: int, file: str, content: bytes) -> None:
        """Write a file beside a version's manifest."""
        self._put(_content(self._digest(name, number), file), content)

    def tombstone(self, name: str, number: int, since: float) -> bytes | None:
        """Read the tombstone of a version, if it has one."""
        if number not in self.listed(name, since).withdrawn:
            return None
        return self._get(_tombstone(name, number))

    def bury(self, name: str, number: int, tombstone: bytes) -> None:
        """Write the tombstone of a version."""
        self._put(_tombstone(name, number), tombstone)

    def prune(self, withdrawn: Sequence[Artefact]) -> list[str]:
        """Delete content that no version refers to, and the files of the withdrawn versions."""
        used = {self._digest(name, number) for name, listed in self._list("") for number in listed.numbers}
        gone = {_content(each.digest, file) for each in withdrawn for file in each.manifest.files}
        old = datetime.now(UTC) - _ABANDONED
        with self._asking():
            content = [each for batch in obstore.list(self._objects, "content/") for each in batch]
            deleted = [
                each["path"]
                for each in content
                if each["path"] in gone
                or (f"sha256:{each['path'].split('/')[1]}" not in used and each["last_modified"] < old)
            ]
            for path in deleted:
                obstore.delete(self._objects, path)
        return [f"{self.root}/{path}" for path in deleted]

    # ------------------------------------------------------------------ the files of a version

    def fetch(self, artefact: Artefact[BaseManifest], file: str) -> None:
        """Bring a file into the cache, if it is not there in its size, and mark it as used.

        Raises ArtefactDamaged if the bucket's is missing or is not as published, StoreUnavailable.
        """
        path, entry = artefact.path / file, artefact.manifest.files[file]
        with suppress(FileNotFoundError):
            if path.stat().st_size == entry.size:
                os.utime(path)
                return
        aside = path.with_name(f".{file}.{os.getpid()}.{time.monotonic_ns()}")
        try:
            with aside.open("wb") as copy:
                found = self._copy(artefact, file, copy.write)
                copy.flush()
                # Otherwise a power cut may leave the name of the file with another content.
                os.fsync(copy.fileno())
            if found != entry.sha256:
                raise ArtefactDamaged(
                    f"{artefact}: {file} in {self.root}: expected {entry.sha256}, found {found}; publish the "
                    "artefact again"
                )
            aside.chmod(0o444)
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
        self._evict()

    def digest_of(self, artefact: Artefact[BaseManifest], file: str, write: Callable[[bytes], object]) -> str:
        """Hash a file in the bucket, without keeping it; `write` receives its bytes. Raises as `fetch`."""
        return self._copy(artefact, file, write)

    def _copy(self, artefact: Artefact[BaseManifest], file: str, write: Callable[[bytes], object]) -> str:
        digest = hashlib.sha256()
        with self._asking():
            try:
                found = obstore.get(self._objects, _content(artefact.digest, file))
            except FileNotFoundError as error:
                raise ArtefactDamaged(
                    f"{artefact}: {file}: expected it in {self.root}, found none; publish the artefact again"
                ) from error
            for chunk in found.stream():
                digest.update(bytes(chunk))
                write(bytes(chunk))
        return f"sha256:{digest.hexdigest()}"

    def _keep(self, path: Path, content: bytes) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_durably(path, content, mode=0o444)

    def _evict(self) -> None:
        """Delete the files of the cache that were not asked for the longest, until it is within its bound."""
        found: list[tuple[float, int, Path]] = []
        for path in self._cache.glob("*/*"):
            # Manifests stay: they are small, and versions are listed by them.
            if path.name not in (MANIFEST, DIGEST_FILE):
                with suppress(FileNotFoundError):
                    about = path.stat()
                    found.append((about.st_mtime, about.st_size, path))
        excess = sum(size for _, size, _ in found) - self._most_cached
        for used, size, path in sorted(found):
            if excess <= 0 or time.time() - used < _IN_USE_S:
                return
            path.unlink(missing_ok=True)
            excess -= size

    # ------------------------------------------------------------------ objects

    def _changed(self, since: float) -> str | None:
        """The entity tag of `changed`, as it was at `since` or later; None before the first change."""
        known = self._state
        if known is not None and known[1] >= since:
            return known[0]
        at = time.monotonic()
        with self._asking():
            try:
                state = obstore.head(self._objects, _CHANGED)["e_tag"]
            except FileNotFoundError:
                state = None
        self._state = (state, at)
        return state

    def _relist(self, name: str, state: str | None = None, at: float = -math.inf) -> Listed:
        """List a name now. Without `at`, the next call of `listed` does so too."""
        listed = dict(self._list(f"{name}/")).get(name, NOTHING)
        return self._remember(name, listed, state, at)

    def _remember(self, name: str, listed: Listed, state: str | None, at: float) -> Listed:
        seen = self._seen.get(name)
        if seen is not None and seen.listed == listed:
            listed = seen.listed
        self._seen[name] = _Seen(listed, state, at)
        return listed

    def _list(self, prefix: str) -> Iterator[tuple[str, Listed]]:
        numbers: dict[str, list[int]] = {}
        withdrawn: dict[str, list[int]] = {}
        with self._asking():
            for batch in obstore.list(self._objects, f"versions/{prefix}", chunk_size=1000):
                for each in batch:
                    _, name, number = each["path"].split("/")
                    if number.isdigit() and NAME.fullmatch(name):
                        numbers.setdefault(name, []).append(int(number))
                        self._times[name, int(number)] = each["last_modified"]
                    elif number.endswith(_WITHDRAWN):
                        withdrawn.setdefault(name, []).append(int(number.removesuffix(_WITHDRAWN)))
        for name in sorted(numbers):
            yield name, Listed(tuple(sorted(numbers[name])), frozenset(withdrawn.get(name, ())))

    def _digest(self, name: str, number: int) -> str:
        if (name, number) not in self._digests:
            found = self._get(_version(name, number)).decode("ascii", "replace")
            if not re.fullmatch("sha256:[0-9a-f]{64}", found):
                raise ArtefactDamaged(
                    f"{name}@{number}: expected a digest in {self.root}/{_version(name, number)}, found "
                    f"{found[:80]!r}; publish the artefact again"
                )
            self._digests[name, number] = found
        return self._digests[name, number]

    def _get(self, path: str) -> bytes:
        with self._asking():
            try:
                return bytes(obstore.get(self._objects, path).bytes())
            except FileNotFoundError as error:
                raise ArtefactDamaged(
                    f"{self.root}/{path}: expected this object, found none; publish the artefact again"
                ) from error

    def _put(self, path: str, data: bytes) -> None:
        with self._asking():
            obstore.put(self._objects, path, data)

    def _create(self, path: str, data: bytes) -> bool:
        """Whether the object was written; False if there was one."""
        with self._asking():
            try:
                obstore.put(self._objects, path, data, mode="create")
            except AlreadyExistsError:
                return False
        return True

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except BaseError as error:
            reason = str(error).splitlines()[0]
            raise StoreUnavailable(
                f"the store {self.root} cannot be used ({reason}): check AWS_ENDPOINT_URL, the credentials "
                "and the network"
            ) from error


_WITHDRAWN = ".withdrawn.json"
_CHANGED = "changed"


def _version(name: str, number: int) -> str:
    return f"versions/{name}/{number}"


def _tombstone(name: str, number: int) -> str:
    return f"versions/{name}/{number}{_WITHDRAWN}"


def _content(digest: str, file: str) -> str:
    return f"content/{digest.removeprefix('sha256:')}/{file}"
