"""Every file of a store, wherever its versions are, as a store in a folder has it: what a copy is made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from model_store.artefact import DIGEST_FILE, MANIFEST, Artefact
from model_store.errors import StoreError
from model_store.signing import SIGNATURE
from model_store.store import REPORT, Store


class StoredFile(NamedTuple):
    """A file by its path in a store's folder. `content` is None where it is damaged, and `why` says how.

    `modified` is in ns since 1970: that of a manifest is when its version was published.
    """

    path: str
    content: bytes | None
    modified: int | None = None
    why: str = ""


def stored_files(store: Store) -> Iterator[StoredFile]:
    """All versions with their signatures, reports and tombstones; of a damaged file, what is wrong with it.

    A version that is published meanwhile may be left out. Raises StoreUnavailable.
    """
    for name in store.versions.names():
        for number in store.versions.numbers(name):
            try:
                artefact = store.versions.artefact(name, number)
                tombstone = store.versions.tombstone(name, number)
            except StoreError as error:
                yield StoredFile(f"{name}/{number}/{MANIFEST}", None, None, str(error))
                continue
            yield from _version(store, artefact, withdrawn=tombstone is not None)
            if tombstone is not None:
                yield StoredFile(f"{name}/{number}.withdrawn.json", tombstone.model_dump_json().encode())


def _version(store: Store, artefact: Artefact, *, withdrawn: bool) -> Iterator[StoredFile]:
    folder = f"{artefact.name}/{artefact.version}"
    for file in artefact.manifest.files:
        try:
            yield StoredFile(f"{folder}/{file}", artefact.read(file))
        except StoreError as error:
            # The files of a withdrawn version may have been pruned.
            if not withdrawn:
                yield StoredFile(f"{folder}/{file}", None, None, str(error))
    for file, content in ((SIGNATURE, store.signatures.of(artefact)), (REPORT, store.report(artefact))):
        if content is not None:
            yield StoredFile(f"{folder}/{file}", content)
    manifest = artefact.path / MANIFEST
    yield StoredFile(f"{folder}/{DIGEST_FILE}", artefact.digest.encode())
    yield StoredFile(f"{folder}/{MANIFEST}", manifest.read_bytes(), manifest.stat().st_mtime_ns)
