"""Rehearse a restore: in a temporary folder, with every digest, the trail, and one answer per hospital.

The restored service is started there, without Redis, worker, PACS and webhooks, and answers by HTTP's own
way inside this process. Nothing of the running service is read or written.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import httpx
import nibabel as nib
import numpy as np
from PIL import Image
from pydantic import SecretStr
from sqlalchemy import select
from sqlalchemy.orm import Session

from model_store.errors import ArtefactWithdrawn, LocumStoreError
from model_store.store import Store
from model_store.task import Task
from service.audit import trail
from service.backup.databases import temporary_postgresql
from service.backup.folder import FILES, STORE, Backup
from service.backup.restoring import check_schema, restore
from service.database import Assignment, Cohort, CohortScan, Database, Hospital, Observation, upgrade
from service.database.schema import head
from service.errors import AnswersHeld, BackupError, ServiceError
from service.observation.rows import keyed_with
from service.settings import Settings, read_settings

# Nothing listens there: what the rehearsal starts takes no job.
_NO_REDIS = SecretStr("redis://127.0.0.1:1")
_LONGEST_EDGE = 64
_ACCEPTED, _OK, _CONFLICT = 202, 200, 409


@dataclass(frozen=True)
class Finding:
    """What was found of a part, in words."""

    part: str
    state: Literal["ok", "wrong"]
    words: str


def rehearse(root: Path, settings: Settings) -> Iterator[Finding]:
    """Restore a backup into a temporary folder, and verify it: a finding per part and hospital.

    The settings say which keys are trusted, how scans are answered, and, of a backup of PostgreSQL, the
    server that the temporary database is made on.
    """
    try:
        backup = Backup(root)
        check_schema(backup)
    except BackupError as error:
        yield Finding("backup", "wrong", str(error))
        return
    wrong = [Finding("files", "wrong", str(error)) for error in backup.damaged()]
    for path, why in backup.manifest.unreadable.items():
        wrong.append(Finding("files", "wrong", f"{path}: it was damaged when the backup was taken: {why}"))
    yield from wrong
    if not wrong:
        yield Finding("files", "ok", _counted(backup))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="locum-rehearsal-")))
        try:
            if any(STORE not in each.words and FILES not in each.words for each in wrong):
                return
            place = _settings(stack, backup, folder, settings)
            restore(backup, place)
            yield from _verified(backup, place)
        except (ServiceError, LocumStoreError, OSError) as error:
            if not wrong:
                yield Finding("restore", "wrong", str(error))


def _counted(backup: Backup) -> str:
    manifest = backup.manifest
    size = sum(entry.size for entry in manifest.files.values()) / 2**20
    gone = f"; {len(manifest.gone)} were deleted while it was taken" if manifest.gone else ""
    words = (
        f"{len(manifest.files)} files, {size:.1f} MiB, as they were at {manifest.began:%Y-%m-%d %H:%M} UTC"
    )
    return words + gone


def _settings(stack: ExitStack, backup: Backup, folder: Path, settings: Settings) -> Settings:
    url: SecretStr | None = None
    if backup.manifest.database == "postgresql":
        if settings.database_url is None:
            raise BackupError(
                "it has a database of PostgreSQL: name the server with LOCUM_DATABASE_URL, where a temporary "
                "database is made"
            )
        own = Database(settings.database_url.get_secret_value())
        made = stack.enter_context(temporary_postgresql(own.url))
        url = SecretStr(made.render_as_string(hide_password=False))
    changed: dict[str, Any] = {
        "store": folder / "store",
        "state_dir": folder / "state",
        "files": None,
        "database_url": url,
        "redis_url": _NO_REDIS,
        "auth": "none",
        "two_person_rule": False,
        "host": "127.0.0.1",
        "root_path": "",
        "allowed_hosts": ("127.0.0.1",),
        "embedded_worker": False,
        "pacs": None,
        "dicom_node": None,
        "watch_webhooks": None,
        "tls_certificate": None,
        "tls_key": None,
        "page": False,
        "monailabel": "off",
        "log_level": "ERROR",
        "verify_every_seconds": 0,
    }
    return read_settings(**{**settings.model_dump(), **changed})


def _verified(backup: Backup, settings: Settings) -> Iterator[Finding]:
    database = Database(settings.resolved_database_url)
    try:
        upgrade(database)
        revision = backup.manifest.revision
        same = "this software's" if revision == head() else f"migrated to {head()}"
        yield Finding("schema", "ok", f"revision {revision} of Locum {backup.manifest.locum}: {same}")
        yield _trail(backup, database)
        store = settings.open_store()
        yield from _store(store)
        yield from asyncio.run(_hospitals(settings, database, store))
    finally:
        database.dispose()


def _trail(backup: Backup, database: Database) -> Finding:
    number, _, digest = backup.manifest.trail.partition(":")
    try:
        with database.snapshot() as session:
            found = trail.verify(session, trail.Head(int(number), digest))
    except ServiceError as error:
        return Finding("trail", "wrong", str(error))
    return Finding("trail", "ok", f"{found.rows} rows in order; the last is {found.head}")


def _store(store: Store) -> Iterator[Finding]:
    count = 0
    for name in store.versions.names():
        for number in store.versions.numbers(name):
            try:
                version = store.versions.get(name, number)
                if version.withdrawn is None:
                    version.artefact.verify()
                count += 1
            except LocumStoreError as error:
                yield Finding("store", "wrong", str(error))
    yield Finding("store", "ok", f"as published: {count} of its versions")


@dataclass(frozen=True)
class _Asked:
    """What a hospital is asked to answer: a scan of it, and the mask that it was answered with, if known."""

    content: bytes
    what: str
    mask: str | None = None


async def _hospitals(settings: Settings, database: Database, store: Store) -> list[Finding]:
    """Start the restored service, and ask it as each hospital does."""
    # It loads what a rehearsal alone needs.
    from service.app import create_app

    with database.read() as session:
        hospitals = list(session.scalars(select(Hospital.id).order_by(Hospital.id)))
    if not hospitals:
        return [Finding("hospitals", "ok", "none is registered")]
    found: list[Finding] = []
    app = create_app(settings)
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=None) as client,
    ):
        for hospital in hospitals:
            with database.read() as session:
                entries = _in_force(session, hospital)
            if not entries:
                found.append(Finding(hospital, "ok", "no version was assigned or served yet"))
            for entry in entries:
                try:
                    found.append(await _answered(settings, database, store, client, entry))
                except ArtefactWithdrawn as error:
                    # So it is where the backup was taken.
                    found.append(Finding(hospital, "ok", f"{_name(entry)} answers no scan: {error}"))
                except (ServiceError, LocumStoreError) as error:
                    found.append(Finding(hospital, "wrong", f"{_name(entry)}: {error}"))
    return found


def _in_force(session: Session, hospital: str) -> list[Assignment]:
    newest: dict[str, Assignment] = {}
    query = select(Assignment).where(Assignment.hospital == hospital).order_by(Assignment.sequence)
    for entry in session.scalars(query):
        newest[entry.model] = entry
    return list(newest.values())


def _name(entry: Assignment) -> str:
    return f"{entry.artefact or entry.model}@{entry.version}"


async def _answered(
    settings: Settings, database: Database, store: Store, client: httpx.AsyncClient, entry: Assignment
) -> Finding:
    """Ask the restored service as the hospital does."""
    artefact = store.by_digest(entry.digest)
    task = artefact.manifest.task
    with database.read() as session:
        asked = _scan(session, settings, entry) or _Asked(_synthetic(task), "a synthetic scan")
    route = "classify" if task.kind == "classification" else "segment"
    said = await client.post(
        f"/{route}",
        files={"scan": ("scan", asked.content)},
        data={"hospital": entry.hospital, "model": entry.model, "guard": "warn"},
    )
    where = f"{_name(entry)} of {entry.model}" if entry.artefact else _name(entry)
    if said.status_code == _ACCEPTED:
        return Finding(entry.hospital, "ok", f"{where} opens, and a worker would answer {asked.what}")
    if said.status_code == _CONFLICT and said.json().get("type", "").endswith(AnswersHeld.slug):
        return Finding(entry.hospital, "ok", f"{where} opens; an alarm of the watch holds its answers")
    if said.status_code != _OK:
        detail = said.json().get("detail", "") if "json" in said.headers.get("content-type", "") else ""
        words = f"{where} did not answer {asked.what}: {said.status_code} {detail}"
        return Finding(entry.hospital, "wrong", words)
    if asked.mask is None:
        return Finding(entry.hospital, "ok", f"{where} answered {asked.what}")
    with database.read() as session:
        query = select(Observation.mask).where(Observation.request == said.headers["Locum-Request"])
        same = session.scalars(query).first() == asked.mask
    as_served = "with the mask that was served" if same else "but with another mask than was served"
    # On another kind of processor a few voxels may differ.
    return Finding(entry.hospital, "ok" if same else "wrong", f"{where} answered {asked.what} {as_served}")


def _scan(session: Session, settings: Settings, entry: Assignment) -> _Asked | None:
    """A scan of the hospital's cohorts: the newest that this version has answered before, else any."""
    keyed = keyed_with(session)
    query = select(CohortScan).join(Cohort, Cohort.id == CohortScan.cohort)
    query = query.where(Cohort.hospital == entry.hospital, Cohort.deleted_at.is_(None))
    files, fallback = settings.open_files(), None
    for row in session.scalars(query.order_by(CohortScan.id.desc()).limit(1000)):
        content = files.read(f"cohorts/{row.cohort}/{row.sha256}")
        if content is None:
            continue
        what = f"scan {row.sha256[:12]}"
        earlier = select(Observation).where(
            Observation.hospital == entry.hospital,
            Observation.version == entry.digest,
            Observation.scan == keyed(f"sha256:{row.sha256}"),
            Observation.usual,
            Observation.mask.is_not(None),
        )
        found = session.scalars(earlier.order_by(Observation.id.desc()).limit(1)).first()
        if found is not None:
            return _Asked(content, f"{what} of {found.at:%Y-%m-%d}", found.mask)
        fallback = fallback or _Asked(content, what)
    return fallback


def _synthetic(task: Task) -> bytes:
    """A scan of noise of the size of the network's input, no edge of a volume longer than 64."""
    generator = np.random.default_rng(0)
    channels = task.channel_count
    if task.geometry is None and channels in (1, 3):
        coloured = channels == 3 or task.colour == "replicate"
        pixels = generator.integers(0, 255, (*task.size, 3) if coloured else task.size, np.uint8)
        stream = io.BytesIO()
        Image.fromarray(pixels).save(stream, "PNG")
        return stream.getvalue()
    edges = (*task.size, 1) if task.geometry is None else task.geometry.patch
    shape = tuple(min(edge, _LONGEST_EDGE) for edge in edges)
    several = (channels,) if channels > 1 else ()
    image = nib.Nifti1Image(generator.integers(0, 255, (*shape, *several)).astype(np.int16), np.eye(4))
    image.header.set_xyzt_units("mm")
    return bytes(image.to_bytes())
