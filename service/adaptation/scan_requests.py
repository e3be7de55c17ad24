"""Accept `personalization=scan` requests: answered at once by a graph that adapts as it runs, else by a job.

A request is rejected at once for the same reasons as any other scan: a scan that cannot be read, does not fit
the task or is rejected by the guard, or an output format that does not fit the scan. An accepted request
that no graph can answer becomes a job, which is durable before the answer. Only its result is kept, until it
expires.
"""

from __future__ import annotations

import asyncio
import errno
from dataclasses import dataclass
from typing import Any

from anyio import to_thread
from sqlalchemy import func, select
from sqlalchemy.orm import Session
from starlette.requests import ClientDisconnect, Request

from model_store.artefact import Artefact
from model_store.guard import check, summarise
from model_store.manifest import ModelManifest
from model_store.preprocessing import check_restorable, prepare
from model_store.scan import decode, deidentify
from personalization.options.presets import SCAN_DEFAULT
from service.catalog.adapted import require_parts
from service.catalog.network import Selection, adapted_to_scan
from service.catalog.version import resolve_parent
from service.cohorts.intake import uid_key
from service.context import ServiceContext
from service.database import Job, in_turn
from service.database.hospitals import share_of
from service.database.job_states import TERMINAL
from service.errors import DiskFull, NotAdaptableToScan, ParametersContradict, ScanQuotaExceeded
from service.jobs import records, submission
from service.jobs.files import JobFolder, StoredScan
from service.kinds import SCAN_BY_JOB, kind_of
from service.kinds.kind import ScanAdaptation
from service.prediction.answer import check_routing, obey_guard
from service.prediction.options import SegmentOptions
from service.prediction.output import choose_output
from service.runtime.spool import ScanFile
from service.settings import Settings, scan_limits

# Short compared with an adaptation, and long enough that polling costs nothing.
_FIRST_LOOK_SECONDS, _LOOK_SECONDS = 0.05, 0.5


# A scan with more in all slices together is left to a worker: its features are held in memory at once.
MOST_PIXELS = 2**20


@dataclass(frozen=True)
class AtOnce:
    """The file of the offered artefact that answers, and the choice for the receipt."""

    file: str
    selection: Selection


@dataclass(frozen=True)
class ScanRequest:
    """A request to segment a scan with a model adapted to it."""

    context: ServiceContext
    request_id: str
    options: SegmentOptions
    upload: ScanFile

    async def accept(self) -> AtOnce | str:
        """Say how the scan is answered at once, or create a durable job, send it on and return its id.

        Raises:
            SelectionError, HospitalUnknown, PredictionError, StoreError, ScanError: as for every scan.
            NotAdaptableToScan, QueueFull, ScanQuotaExceeded, DiskFull.
        """
        if self.options.site is not None:
            raise ParametersContradict(
                "`site` belongs to personalization=member, found personalization=scan; leave one of them out."
            )
        parent, adaptation = await to_thread.run_sync(self._parent)
        async with self.context.admission.turn():
            at_once = await to_thread.run_sync(self._check, parent, adaptation)
            if at_once is not None:
                return at_once
            content = await to_thread.run_sync(self._content)
        return await to_thread.run_sync(self._keep, parent, content)

    def _parent(self) -> tuple[Artefact, ScanAdaptation[Any]]:
        options = self.options
        found = resolve_parent(
            self.context.store, self.context.database, options.model, options.hospital, "segmentation"
        )
        adaptation = kind_of(found).adaptation
        if adaptation is None or adaptation.scan is None:
            raise NotAdaptableToScan(
                f"'{found}' is of kind {found.manifest.kind}: ask without personalization=scan, or name "
                f"{SCAN_BY_JOB}."
            )
        check_routing(options, found)
        return found, adaptation.scan

    def _check(self, parent: Artefact, adaptation: ScanAdaptation[Any]) -> AtOnce | None:
        """Reject now what the worker would reject later; find out whether no worker is needed."""
        store = self.context.store
        model = store.by_digest(adaptation.network(parent), ModelManifest)
        manifest = model.manifest
        options, task = self.options, manifest.task
        scan = decode(self.upload.read(), scan_limits(self.context.settings, task))
        choose_output(options.output, scan, task, options.segmentation_type, options.compress, options.voxels)
        prepared = prepare(scan, manifest.task)
        check_restorable(prepared.geometry, manifest.task)
        warnings = check(summarise(scan, prepared), manifest.statistics, manifest.task)
        obey_guard(self.options, warnings, manifest.task.name)
        file, small = adaptation.graph, prepared.slices[:, 0].size <= MOST_PIXELS
        usual = self.options.preset in (None, SCAN_DEFAULT) and self.options.shape_weight is None
        if file is None or file not in parent.manifest.files or not (small and usual):
            # Unlike this graph, a worker loads every part.
            require_parts(store, parent)
            return None
        why = f"`{SCAN_DEFAULT}`, for this scan alone"
        return AtOnce(
            file, adapted_to_scan(store, self.context.database, parent, model, options.hospital, why)
        )

    def _content(self) -> bytes:
        """What is kept of the scan: without the patient, unless the answer repeats the patient."""
        data, settings = self.upload.read(), self.context.settings
        if self.options.output in ("dicom-seg", "dicom-sr"):
            return data
        return deidentify(data, scan_limits(settings), uid_key(settings))

    def _keep(self, parent: Artefact, content: bytes) -> str:
        context, job_id = self.context, records.new_id()
        folder = JobFolder(context.settings.open_files(), job_id)
        try:
            # The file comes before the row, because a job without its scan cannot run.
            folder.write_input(StoredScan(content, self.upload.sha256, self.upload.size))
            with context.database.write() as session:
                _check_room(session, context.settings, self.options.hospital, len(content))
                records.create(
                    session,
                    context.settings,
                    kind="scan",
                    hospital=self.options.hospital,
                    model=parent.name,
                    parent=parent.digest,
                    cohort=None,
                    options=self.options.model_dump(mode="json"),
                    job_id=job_id,
                    input_bytes=len(content),
                    request_id=self.request_id,
                )
        except OSError as error:
            folder.delete()
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise DiskFull("The service's disk is full; send the scan later.") from error
        except BaseException:
            folder.delete()
            raise
        submission.send(context.database, context.queue, job_id)
        return job_id


async def wait_for(request: Request, context: ServiceContext, job_id: str, seconds: float) -> Job:
    """Wait until the job ends or `seconds` have passed, without blocking the event loop.

    Raises:
        ClientDisconnect: the client disconnected. No other client knows the job, so it is cancelled.
    """
    loop = asyncio.get_running_loop()
    deadline, pause = loop.time() + seconds, _FIRST_LOOK_SECONDS
    while True:
        job = await to_thread.run_sync(_look, context, job_id)
        left = deadline - loop.time()
        if job.state in TERMINAL or left <= 0:
            return job
        if await request.is_disconnected():
            await to_thread.run_sync(submission.cancel, context.database, context.settings, job_id)
            raise ClientDisconnect
        await asyncio.sleep(min(pause, left))
        pause = min(2 * pause, _LOOK_SECONDS)


def _check_room(session: Session, settings: Settings, hospital: str | None, size: int) -> None:
    """Raise ScanQuotaExceeded if `size` more bytes exceed the quota of waiting scans: that of cohorts.

    The share of a hospital, or of a caller without one, is bounded too, see `share_of`.
    """
    in_turn(session, records.QUEUE)
    total = select(func.coalesce(func.sum(Job.input_bytes), 0)).where(Job.state.not_in(TERMINAL))
    waiting = int(session.scalar(total) or 0)
    own = int(session.scalar(total.where(records.of_owner(session, hospital))) or 0)
    quota = settings.cohort_quota_bytes
    share = share_of(session, quota)
    scans = f"scans of {'yours' if hospital is None else f'hospital {hospital!r}'} that wait for a worker"
    if size > share:
        detail = (
            f"The scan has {size} bytes, and the {scans} may have {share} together: a larger one needs a "
            "larger LOCUM_COHORT_QUOTA_BYTES."
        )
    elif own + size > share:
        detail = (
            f"The {scans} have {own} bytes, and {size} more are beyond the {share} that they may have of "
            "LOCUM_COHORT_QUOTA_BYTES: send it again when GET /jobs?state=queued names fewer."
        )
    elif waiting + size > quota:
        detail = (
            f"Expected room for {size} bytes among all scans that wait for a worker, found less of the "
            f"{quota} of LOCUM_COHORT_QUOTA_BYTES: send it again later."
        )
    else:
        return
    raise ScanQuotaExceeded(detail)


def _look(context: ServiceContext, job_id: str) -> Job:
    with context.database.read() as session:
        return records.get(session, job_id)
