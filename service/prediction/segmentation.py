"""The answer of `/segment`: a mask, an overlay or a report."""

from __future__ import annotations

from dataclasses import dataclass, field

from model_store.guard import GuardWarning
from model_store.scan import Scan, open_series
from service.inference.pipeline import Segmentation, segment
from service.prediction.answer import Answer, Predictor
from service.prediction.dicom_seg import encode_report, encode_seg
from service.prediction.dicom_source import notes_on
from service.prediction.options import SegmentOptions
from service.prediction.output import (
    MEDIA_TYPES,
    Output,
    SegmentationReport,
    centroids,
    choose_output,
    encode,
    label_header,
    label_names,
    measure,
    pool_selections,
)


@dataclass
class SegmentationPredictor(Predictor[SegmentOptions]):
    """One scan to be segmented."""

    output: Output = field(default="json", init=False)

    KIND = "segmentation"

    def make(self, data: bytes) -> Answer:
        """Segment the scan in `data` and encode the output. Raises as the base class."""
        selection, task = self.selection, self.selection.manifest.task
        found = segment(
            data,
            selection.manifest,
            self.session,
            self.limits,
            self.watch,
            self._before_running,
            self.routing,
            whole=self.whole,
            with_map=self.options.voxels == "uncertainty",
        )
        with self.watch.stage("encode"):
            title = f"{selection.offered}  ·  {selection.header}"
            notes = found.scan.notes
            media_type, filename = MEDIA_TYPES[self.output]
            segmentation = None
            if self.output in ("dicom-seg", "dicom-sr"):
                series, receipt = open_series(data, self.limits), self._receipt(output=self.output)
                kind = self.options.segmentation_type or "binary"
                if self.output == "dicom-seg":
                    body = encode_seg(series, found.classes, task, receipt, kind)
                else:
                    volumes = {label: each.volume_ml or 0.0 for label, each in measure(found, task).items()}
                    body, segmentation = encode_report(series, found.classes, task, receipt, volumes, kind)
                # Afterwards, since a header that cannot be read has been refused by now.
                notes = (*notes, *notes_on(series))
            else:
                body, media_type = encode(
                    self.output,
                    found,
                    task,
                    title,
                    self._warning_names(found.warnings, notes),
                    lambda: self._report(found),
                    compress=self.options.compress is not False,
                )
        headers = self._headers(found.warnings, notes, filename) | {"Locum-Labels": label_header(task)}
        return Answer(body, media_type, headers, found.picked, segmentation, found.warnings)

    def _before_running(self, scan: Scan, warnings: tuple[GuardWarning, ...]) -> None:
        options, task = self.options, self.selection.manifest.task
        self.output = choose_output(
            options.output, scan, task, options.segmentation_type, options.compress, options.voxels
        )
        super()._before_running(scan, warnings)

    def _report(self, found: Segmentation) -> SegmentationReport:
        return SegmentationReport(
            labels=measure(found, self.selection.manifest.task),
            uncertainty=found.uncertainty,
            attention=found.attention,
            picked=pool_selections(found.picked),
            warnings=self._warning_texts(found.warnings, found.scan.notes),
            shape=list(found.classes.shape),
            label_names=label_names(self.selection.manifest.task),
            centroids=centroids(found.classes, self.selection.manifest.task),
            timing_ms=self._timing(),
            receipt=self._receipt(output=self.output),
        )
