"""A service's folders without its API: a store with the routing space `organ`, a database, jobs to run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from model_store.digest import sha256
from model_store.manifest import GRAPH, WEIGHTS, ModelManifest, RoutingSpaceManifest
from model_store.store import Store
from service.cohorts import cohorts
from service.database import Database, Hospital, Job, JobEvent, upgrade
from service.jobs import records
from service.jobs.files import JobFolder, StoredScan
from service.runtime.spool import Upload
from service.settings import Settings
from service.worker.candidate import CandidateDraft
from service.worker.routing_adapt import LoadedSpace, load_space
from tests.helpers.model_store.graphs import graph_of
from tests.helpers.service.migrated import begin_migrated
from tests.helpers.service.queued import queued


@dataclass
class Workplace:
    settings: Settings
    database: Database

    @property
    def store(self) -> Store:
        return Store(self.settings.store)

    @property
    def space(self) -> str:
        """The digest of the routing space."""
        return self.store.open("organ").digest

    def loaded(self) -> LoadedSpace:
        """The routing space, as the worker loads it."""
        return load_space(self.store, self.store.by_digest(self.space, RoutingSpaceManifest))

    def cohort(self, scans: Mapping[str, bytes], hospital: str = "dune") -> str:
        with self.database.write() as session:
            made = cohorts.create(session, self.settings, hospital)
        for name, data in scans.items():
            upload = Upload(self.settings.spool)
            upload.write(data)
            cohorts.add_scan(self.database, self.settings, hospital, made.id, name, upload, "nifti")
            upload.close()
        return made.id

    def adaptation(self, cohort: str | None, **fields: Any) -> str:
        """A queued job, by default of preset `paper` with two epochs."""
        options = fields.pop("options", {"epochs": 2})
        if fields.get("kind") != "scan":
            options = {"preset": "paper", **options}
        parent = {} if "parent" in fields else {"parent": self.space}
        with self.database.write() as session:
            return queued(
                session,
                self.settings,
                cohort=cohort,
                options=options,
                **{"hospital": "dune", "model": "organ", **parent, **fields},
            ).id

    def scan_job(
        self, scan: bytes, parent: str | None = None, *, alarmed: bool = False, **options: Any
    ) -> str:
        job_id = records.new_id()
        self.folder(job_id).write_input(StoredScan(scan, sha256(scan), len(scan), alarmed=alarmed))
        fields = {} if parent is None else {"parent": parent}
        return self.adaptation(None, kind="scan", hospital=None, options=options, job_id=job_id, **fields)

    def folder(self, job_id: str) -> JobFolder:
        return JobFolder(self.settings.open_files(), job_id)

    def job(self, job_id: str) -> Job:
        with self.database.read() as session:
            return records.get(session, job_id)

    def events(self, job_id: str, *types: str) -> list[JobEvent]:
        with self.database.read() as session:
            return [e for e in records.events_after(session, job_id) if not types or e.type in types]

    def expire(self, job_id: str) -> None:
        """As if the job's worker had not been heard of for long."""
        with self.database.write() as session:
            records.get(session, job_id).lease_until = datetime.now(UTC) - timedelta(hours=1)

    def candidates(self) -> list[ModelManifest]:
        store = self.store
        if "organ.at-dune" not in store.versions.names():
            return []
        manifests = [version.artefact.manifest for version in store.versions.of("organ.at-dune")]
        return [manifest for manifest in manifests if isinstance(manifest, ModelManifest)]


@contextmanager
def opened(root: Path, routing_store: Path, **settings: Any) -> Iterator[Workplace]:
    """Everything new, with the hospital `dune`."""
    store = root / "store"
    shutil.copytree(routing_store, store)
    chosen = {"device": "cpu", "threads": 1, **settings}
    place = Settings(store=store, state_dir=root / "state", **chosen)
    database = Database(place.resolved_database_url)
    place.state_dir.mkdir(mode=0o700)
    begin_migrated(database)
    upgrade(database)
    now = datetime.now(UTC)
    with database.write() as session:
        session.add(Hospital(id="dune", name="Dune", site=None, created_at=now, updated_at=now))
    place.spool.mkdir(parents=True, exist_ok=True)
    try:
        yield Workplace(place, database)
    finally:
        database.dispose()


def draft_of(loaded: LoadedSpace, weights: bytes = b"weights") -> CandidateDraft:
    """A candidate of the space, made without an adaptation."""
    return CandidateDraft(
        parent=loaded.offered,
        model=loaded.manifest,
        method="none",
        files={WEIGHTS: weights, GRAPH: graph_of("graph")},
        epochs=1,
        seed=0,
        details={},
        statistics=None,
    )
