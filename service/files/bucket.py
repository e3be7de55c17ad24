"""Files in a bucket of an S3 service, for API processes and workers that share no disk.

Each object has the sha256 of its content in its metadata, and is compared with it when it is read. An object
is one request: of an upload in parts, the parts of a killed process would stay, out of sight.

The bucket must not keep versions of objects: a deleted scan would stay in it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import cast

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store

from model_store.bucket import connect
from model_store.digest import sha256
from service.errors import FileDamaged, FilesUnavailable
from service.files.folder import STAGED_LIFETIME_SECONDS, STAGING

_DIGEST = "sha256"
_RETRY_SECONDS = 5


@dataclass(frozen=True)
class _Staged:
    bucket: FilesBucket
    key: str

    def keep(self, key: str) -> None:
        """Copy the object to its key, inside the S3 service."""
        self.bucket.copy(self.key, key)


class FilesBucket:
    """`Files` in a bucket. Address and credentials come from the environment, as for the model store."""

    def __init__(self, url: str) -> None:
        self.location = url.rstrip("/")
        with self._asking():
            self._objects: S3Store = connect(self.location)

    def check(self) -> None:
        """List the bucket."""
        with self._asking():
            obstore.list_with_delimiter(self._objects)

    def read(self, key: str) -> bytes | None:
        """Return an object's content; None if there is none."""
        with self._asking():
            try:
                found = obstore.get(self._objects, key)
                content = bytes(found.bytes())
            except FileNotFoundError:
                return None
        expected = found.attributes.get(_DIGEST)
        if expected != sha256(content):
            raise FileDamaged(
                f"{self.location}/{key}: expected {expected or 'its sha256 in the metadata'}, found content "
                f"of {sha256(content)}: upload or compute it again"
            )
        return content

    def write(self, key: str, content: bytes) -> None:
        """Write an object."""
        with self._asking():
            obstore.put(
                self._objects, key, content, attributes={_DIGEST: sha256(content)}, use_multipart=False
            )

    def create(self, key: str, content: bytes) -> bytes:
        """Write an object unless there is one, and return what is there then."""
        # The object of another process is as good.
        with self._asking(), suppress(AlreadyExistsError):
            obstore.put(self._objects, key, content, attributes={_DIGEST: sha256(content)}, mode="create")
        return cast(bytes, self.read(key))

    @contextmanager
    def stage(self, folder: str, chunks: Iterable[bytes]) -> Iterator[_Staged]:
        """Write an object without a key."""
        key = f"{folder}/{STAGING}/{uuid.uuid4().hex}"
        self.write(key, b"".join(chunks))
        try:
            yield _Staged(self, key)
        finally:
            # What cannot be deleted now is deleted by `sweep`.
            with suppress(FilesUnavailable):
                self.remove(key)

    def copy(self, key: str, to: str) -> None:
        """Copy an object, metadata included."""
        with self._asking():
            obstore.copy(self._objects, key, to)

    def remove(self, *keys: str) -> None:
        """Delete objects, where they exist."""
        with self._asking():
            obstore.delete(self._objects, keys)

    def remove_folder(self, folder: str) -> None:
        """Delete every object below `folder`, if there are any."""
        self.remove(*(path for path, _ in self._listed(folder)))

    def names(self, folder: str) -> list[str]:
        """List the objects below `folder` by their paths in it, sorted."""
        return sorted(path.removeprefix(f"{folder}/") for path, _ in self._listed(folder))

    def folders(self, folder: str) -> list[tuple[str, float]]:
        """List the folders in `folder`: name, and time of the last change in seconds since the epoch."""
        newest: dict[str, float] = {}
        for path, changed in self._listed(folder):
            name, below, _ = path.removeprefix(f"{folder}/").partition("/")
            if below:
                newest[name] = max(changed, newest.get(name, 0.0))
        return list(newest.items())

    def sweep(self, folder: str) -> None:
        """Delete the staged objects that killed processes left in `folder`."""
        before = time.time() - STAGED_LIFETIME_SECONDS
        self.remove(*(path for path, changed in self._listed(f"{folder}/{STAGING}") if changed < before))

    def _listed(self, folder: str) -> list[tuple[str, float]]:
        with self._asking():
            batches = obstore.list(self._objects, f"{folder}/")
            return [(each["path"], each["last_modified"].timestamp()) for batch in batches for each in batch]

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except BaseError as error:
            raise FilesUnavailable(
                f"the files in {self.location} cannot be used ({str(error).splitlines()[0]}): try again, and "
                "check AWS_ENDPOINT_URL, the credentials and the network",
                headers={"Retry-After": str(_RETRY_SECONDS)},
            ) from error
