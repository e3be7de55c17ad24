"""From a received scan and a chosen network to the response: the part of a request that runs in a thread."""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.responses import Response

from model_store.manifest import GRAPH
from model_store.scan import Scan
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


@dataclass
class Answering:
    """One request, once its upload is there and its network is chosen."""

    context: Context
    request_id: str
    options: SegmentOptions
    selection: Selection
    upload: Upload
    watch: Stopwatch
    output: Output = field(default="json", init=False)

    def make(self) -> Response:
        """Segment and encode. Raises ScanError, StoreError, Problem."""
        selection, task = self.selection, self.selection.manifest.task
        graph = selection.manifest.files[GRAPH].sha256
        with self.watch.stage("load"):
            session = self.context.sessions.get(graph, lambda: selection.model.read(GRAPH))
        with self.watch.stage("read"):
            data = self.upload.read()
        limits = scan_limits(self.context.settings)
        found = segment(data, selection.manifest, session, limits, self.watch, self._before_running)
        self.context.metrics.inference_seconds.labels(selection.offered.name, session.provider).observe(
            self.watch.stages["inference"] / 1000
        )
        with self.watch.stage("encode"):
            title = f"{selection.offered}  ·  {selection.header}"
            body = encode(self.output, found, task, title, lambda: self._report(found, session))
        media_type, filename = MEDIA_TYPES[self.output]
        headers = {
            "Locum-Model": str(selection.offered),
            "Locum-Graph": graph,
            "Locum-Personalization": selection.header,
            "Locum-Labels": label_header(task),
            "Locum-Warnings": str(len(found.warnings)),
            "Server-Timing": self.watch.header(),
            "Content-Disposition": f'inline; filename="{filename}"',
            "Cache-Control": "no-store",
        }
        return Response(body, headers=headers, media_type=media_type)

    def _before_running(self, scan: Scan, warnings: tuple[str, ...]) -> None:
        self.output = choose_output(self.options.output, scan)
        if warnings and self.options.guard == "refuse":
            raise Problem(
                422,
                "scan-unlike-task",
                "The scan does not look like the task",
                f"{'; '.join(warnings)}. Send a scan of task '{self.selection.manifest.task.name}', or "
                "guard=warn to have it segmented all the same.",
                warnings=list(warnings),
            )

    def _report(self, found: Segmentation, session: Session) -> SegmentationReport:
        selection = self.selection
        receipt = Receipt(
            request=self.request_id,
            input_sha256=self.upload.sha256,
            input_bytes=self.upload.size,
            model=ModelReceipt(name=str(selection.offered), digest=selection.offered.digest),
            network=ModelReceipt(name=str(selection.model), digest=selection.model.digest),
            graph=session.digest,
            personalization=selection.personalization,
            site=selection.site,
            why=selection.why,
            options={**self.options.model_dump(), "output": self.output},
            provider=session.provider,
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
