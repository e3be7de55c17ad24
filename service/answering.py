"""From a scan and a chosen network to the answer, in a thread of the API or in the worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.responses import Response

from model_store.artefact import Artefact
from model_store.manifest import GRAPH
from model_store.scan import Limits, Scan
from service.answers import (
    MEDIA_TYPES,
    Output,
    SegmentationReport,
    choose_output,
    encode,
    label_header,
    measure,
)
from service.context import Context
from service.inference.pipeline import Segmentation, Stopwatch, segment
from service.inference.sessions import Session
from service.problems import Problem
from service.receipts import ModelReceipt, Receipt, software
from service.scan_limits import scan_limits
from service.segment_options import SegmentOptions
from service.selection import Selection
from service.spool import Upload


@dataclass(frozen=True)
class Answer:
    """A response's body, its media type and its headers."""

    body: bytes
    media_type: str
    headers: dict[str, str]


def obey_guard(options: SegmentOptions, warnings: Sequence[str], task: str) -> None:
    """Raises Problem 422 for a scan that the guard warns of, if the request said to refuse it."""
    if warnings and options.guard == "refuse":
        raise Problem(
            422,
            "scan-unlike-task",
            "The scan does not look like the task",
            f"{'; '.join(warnings)}. Send a scan of task '{task}', or guard=warn to have it segmented all "
            "the same.",
            warnings=list(warnings),
        )


@dataclass
class Answering:
    """One scan, once its bytes are there and its network is chosen and loaded.

    `network` is what answers inside `selection`, for the receipt; `input_sha256` the digest of the bytes.
    """

    request_id: str
    options: SegmentOptions
    selection: Selection
    session: Session
    network: ModelReceipt
    input_sha256: str
    limits: Limits
    watch: Stopwatch
    output: Output = field(default="json", init=False)
    _size: int = field(default=0, init=False)

    def make(self, data: bytes) -> Answer:
        """Segment and encode. Raises ScanError, StoreError, Problem."""
        selection, task, session = self.selection, self.selection.manifest.task, self.session
        self._size = len(data)
        found = segment(data, selection.manifest, session, self.limits, self.watch, self._before_running)
        with self.watch.stage("encode"):
            title = f"{selection.offered}  ·  {selection.header}"
            body = encode(self.output, found, task, title, lambda: self._report(found))
        media_type, filename = MEDIA_TYPES[self.output]
        headers = {
            "Locum-Model": str(selection.offered),
            "Locum-Graph": session.digest,
            "Locum-Personalization": selection.header,
            "Locum-Labels": label_header(task),
            "Locum-Warnings": str(len(found.warnings)),
            "Server-Timing": self.watch.header(),
            "Content-Disposition": f'inline; filename="{filename}"',
            "Cache-Control": "no-store",
        }
        return Answer(body, media_type, headers)

    def _before_running(self, scan: Scan, warnings: tuple[str, ...]) -> None:
        self.output = choose_output(self.options.output, scan)
        obey_guard(self.options, warnings, self.selection.manifest.task.name)

    def _report(self, found: Segmentation) -> SegmentationReport:
        selection = self.selection
        receipt = Receipt(
            request=self.request_id,
            input_sha256=self.input_sha256,
            input_bytes=self._size,
            model=receipt_of(selection.offered),
            network=self.network,
            graph=self.session.digest,
            personalization=selection.personalization,
            site=selection.site,
            why=selection.why,
            options={**self.options.model_dump(), "output": self.output},
            provider=self.session.provider,
            **software(),
        )
        return SegmentationReport(
            labels=measure(found, selection.manifest.task),
            uncertainty=found.uncertainty,
            warnings=list(found.warnings),
            shape=list(found.classes.shape),
            timing_ms={name: round(duration, 3) for name, duration in self.watch.stages.items()},
            receipt=receipt,
        )


def answer_upload(
    context: Context,
    request_id: str,
    options: SegmentOptions,
    selection: Selection,
    upload: Upload,
    watch: Stopwatch,
) -> Response:
    """Answer a request in a thread of the API. Raises ScanError, StoreError, Problem."""
    graph = selection.manifest.files[GRAPH].sha256
    with watch.stage("load"):
        session = context.sessions.get(graph, lambda: selection.model.read(GRAPH))
    with watch.stage("read"):
        data = upload.read()
    answer = Answering(
        request_id=request_id,
        options=options,
        selection=selection,
        session=session,
        network=receipt_of(selection.model),
        input_sha256=upload.sha256,
        limits=scan_limits(context.settings),
        watch=watch,
    ).make(data)
    context.metrics.inference_seconds.labels(selection.offered.name, session.provider).observe(
        watch.stages["inference"] / 1000
    )
    return Response(answer.body, headers=answer.headers, media_type=answer.media_type)


def receipt_of(artefact: Artefact) -> ModelReceipt:
    """A published artefact, for a receipt."""
    return ModelReceipt(name=str(artefact), digest=artefact.digest)
