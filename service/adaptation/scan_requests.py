"""Accept `personalization=scan` requests: answered at once by a graph that adapts as it runs, else by a job.

A request is rejected at once for the same reasons as any other scan: a scan that cannot be read, does not fit
the task or is rejected by the guard, or an output format that does not fit the scan. An accepted request
that no graph can answer becomes a job, which is durable before the answer. Only its result is kept, until it
expires.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from anyio import to_thread
from starlette.requests import ClientDisconnect, Request

from model_store.artefact import Artefact
from model_store.manifest import ModelManifest
from model_store.preprocessing import PreparedVolume
from model_store.scan import choose_series
from personalization.options.presets import AUTO, SCAN_FALLBACK
from service.adaptation.scan_jobs import create, kept_of
from service.catalog.adapted import require_parts, resolve_adaptable
from service.catalog.network import Selection, adapted_to_scan, by_lens_of_scan, has_dose_of_scan
from service.catalog.precision import require_float32
from service.catalog.version import ResolvedVersion
from service.catalog.ways import ways_of
from service.context import ServiceContext
from service.errors import NotAdaptableToScan, ParametersContradict
from service.inference.pipeline import PreparedScan, Stopwatch
from service.inference.volumes import is_taken_together
from service.job_kinds import scan as scan_job
from service.jobs.files import StoredScan
from service.kinds import SCAN_BY_JOB, adaptation_of
from service.prediction.options import SegmentOptions
from service.prediction.segmentation import SegmentationPredictor
from service.runtime.spool import ScanFile
from service.settings import scan_limits

# A scan with more in all slices together is left to a worker: its features are held in memory at once.
MOST_PIXELS = 2**20

Answered = TypeVar("Answered")


@dataclass(frozen=True)
class ScanRequest:
    """A request to segment a scan with a model adapted to it.

    `parent` is the artefact that is adapted, and `graph` its file that answers at once, for a scan that is
    small enough; None where a worker has to. `predictor` reads the scan, and answers at once.
    """

    context: ServiceContext
    upload: ScanFile
    parent: Artefact
    predictor: SegmentationPredictor
    graph: str | None

    @classmethod
    def of(
        cls,
        context: ServiceContext,
        request_id: str,
        options: SegmentOptions,
        upload: ScanFile,
        found: ResolvedVersion,
        watch: Stopwatch,
    ) -> ScanRequest | Selection:
        """Choose the artefact to adapt, by the version that was found. Blocking.

        Where a lens is all that is fitted, the choice is a network that answers as any other.

        Raises:
            SelectionError, NotAdaptableToScan: the options do not go with it.
            StoreError: the model to be adapted does not open.
        """
        if options.site is not None:
            raise ParametersContradict(
                "`site` belongs to personalization=member, found personalization=scan; leave one of them out."
            )
        require_float32(found)
        parent = resolve_adaptable(context.store, found.artefact)
        adaptation = adaptation_of(parent)
        scan = None if adaptation is None else adaptation.scan
        named = options.preset not in (None, AUTO) or options.shape_weight is not None
        if not named and (by_lens := by_lens_of_scan(context.store, found)) is not None:
            return by_lens
        if scan is None:
            raise NotAdaptableToScan(
                f"'{parent}' is of kind {parent.manifest.kind}: ask without personalization=scan, or name "
                f"{SCAN_BY_JOB}."
            )
        model = context.store.by_digest(scan.network(parent), ModelManifest)
        ways = ways_of(context.store, parent)
        graphs = scan.graphs
        preset = options.preset or AUTO
        if preset not in (AUTO, *scan.presets):
            raise NotAdaptableToScan(
                f"preset '{preset}' weighs models of a federation's members, and '{parent}' is one model: "
                f"leave `preset` out, or name one of {', '.join(scan.presets)}."
            )
        ways.check_scan(preset)
        if preset == AUTO and not has_dose_of_scan(parent):
            preset = SCAN_FALLBACK
        why = f"`{preset}`, for this scan alone"
        predictor = SegmentationPredictor(
            request_id=request_id,
            options=options,
            selection=adapted_to_scan(
                context.store, parent, model, found.home, why, preset=preset, alarmed=found.stop is not None
            ),
            input_sha256=upload.sha256,
            input_bytes=upload.size,
            limits=scan_limits(context.settings, model.manifest.task),
            watch=watch,
            reviews=context.reviews,
        )
        graph = graphs.get(preset) if options.shape_weight is None else None
        return cls(context, upload, parent, predictor, graph if graph in parent.manifest.files else None)

    async def accept(
        self, request: Request, answer: Callable[[PreparedScan, str], Answered]
    ) -> Answered | str:
        """Answer at once, or create a durable job, send it on and return its id.

        Args:
            request: of the client that waits.
            answer: runs a file of the parent on the whole scan, in a thread.

        Raises:
            HospitalUnknown, PredictionError, StoreError, ScanError: as for every scan.
            QueueFull, ScanQuotaExceeded, DiskFull.
            ClientDisconnect: the client left while it waited.
        """
        async with self.context.admission.turn() as turn:
            self.predictor.watch.stages["wait"] = turn.waited * 1000
            if await request.is_disconnected():
                raise ClientDisconnect
            made = await to_thread.run_sync(self._answer_or_prepare, answer)
        return await to_thread.run_sync(self._keep, made) if isinstance(made, bytes) else made

    def _answer_or_prepare(self, answer: Callable[[PreparedScan, str], Answered]) -> Answered | bytes:
        """Answer, or reject what the worker would reject later and return what a job keeps of the scan."""
        predictor = self.predictor
        data = choose_series(self.upload.read(), predictor.options.series, predictor.limits)
        answered = self._answer(data, answer)
        if answered is not None:
            return answered
        # Unlike the graph, a worker loads every part.
        require_parts(self.context.store, self.parent)
        return kept_of(data, predictor.options, self.context.settings)

    def _answer(self, data: bytes, answer: Callable[[PreparedScan, str], Answered]) -> Answered | None:
        opened, task = self.predictor.open(data), self.predictor.selection.manifest.task
        price = opened.price
        if price is not None and (self.graph is None or not is_taken_together(price.grid, task)):
            # A volume for a job is prepared there, and its guard is the job's.
            return None
        reading = self.predictor.prepare(opened)
        if self.graph is None or not _is_small(reading):
            return None
        return answer(reading, self.graph)

    def _keep(self, content: bytes) -> str:
        predictor = self.predictor
        scan = StoredScan(
            content,
            self.upload.sha256,
            self.upload.size,
            series=predictor.options.series,
            alarmed=predictor.selection.alarmed,
        )
        return create(self.context, scan_job.KIND, predictor.options, self.parent, scan, predictor.request_id)


def _is_small(reading: PreparedScan) -> bool:
    """Whether a graph may take all slices of a scan at once."""
    if isinstance(reading.prepared, PreparedVolume):
        return True
    return reading.prepared.slices[:, 0].size <= MOST_PIXELS
