"""The answer of `/segment`: a mask, an overlay or a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from typing_extensions import override

from model_store.preprocessing import check_volume_restorable
from model_store.scan import Note, Scan, open_series
from service.inference.pipeline import OpenedScan, PreparedScan, Segmentation, check_answerable, segment
from service.observation import Observed, SeenLabel, mask_digest, seen_labels
from service.prediction.answer import EncodedAnswer, LoadedGraph, Predictor
from service.prediction.dicom_rtstruct import encode_rtstruct
from service.prediction.dicom_seg import encode_report, encode_seg
from service.prediction.dicom_source import notes_on
from service.prediction.options import SegmentOptions
from service.prediction.output import (
    DICOM_OUTPUTS,
    MEDIA_TYPES,
    Output,
    SegmentationReport,
    centroids,
    choose_output,
    encode,
    label_header,
    label_names,
    label_reports,
    pool_selections,
)


class SegmentationPredictor(Predictor[SegmentOptions]):
    """One scan to be segmented."""

    KIND = "segmentation"

    def make(self, reading: PreparedScan, graph: LoadedGraph) -> EncodedAnswer:
        """Segment the scan and encode the output. Raises as the base class."""
        selection, task = self.selection, self.selection.manifest.task
        found = self.segment(reading, graph)
        seen, mask = self._seen(reading, found)
        with self.watch.stage("encode"):
            title = f"{selection.offered}  ·  {selection.header}"
            output = self._output(reading.scan)
            more: tuple[Note, ...] = ()
            media_type, filename = MEDIA_TYPES[output]
            segmentation = None
            if output in DICOM_OUTPUTS:
                series = open_series(reading.data, self.limits)
                receipt = self._receipt(graph, reading, found.shift, output=output)
                kind = self.options.segmentation_type or "binary"
                if output == "dicom-seg":
                    body = encode_seg(series, found.classes, task, receipt, kind)
                elif output == "dicom-rtstruct":
                    tolerance = self.options.tolerance_mm or 0.0
                    body = encode_rtstruct(series, found.classes, task, receipt, tolerance)
                else:
                    volumes = {each.label: each.volume_ml or 0.0 for each in seen}
                    review = self._review(found)
                    body, segmentation = encode_report(
                        series, found.classes, task, receipt, volumes, review, kind
                    )
                # Afterwards, since a header that cannot be read has been refused by now.
                more = notes_on(series)
            else:
                body, media_type = encode(
                    output,
                    found,
                    task,
                    title,
                    self._warning_names(reading),
                    lambda: self._report(found, seen, reading, graph, output),
                    compress=self.options.compress is not False,
                )
        headers = self._headers(graph, reading, filename, more) | {"Locum-Labels": label_header(task)}
        observed = self._observed(graph, reading, seen, found.shift, mask)
        return EncodedAnswer(
            body, media_type, headers, observed, found.picked, segmentation, reading.warnings, found
        )

    def segment(self, reading: PreparedScan, graph: LoadedGraph) -> Segmentation:
        """Run the network as every answer does, before anything is encoded. Raises as the base class."""
        return segment(
            reading,
            self.selection.manifest,
            graph.session,
            self.watch,
            self.options.routing or "scan",
            whole=graph.whole,
            with_map=self.options.voxels == "uncertainty",
            between=self.between,
        )

    def dicom_seg(self, reading: PreparedScan, found: Segmentation, graph: LoadedGraph) -> bytes:
        """The answer to a DICOM series as a DICOM SEG. Raises PredictionError where none can be made."""
        receipt = self._receipt(graph, reading, found.shift, output="dicom-seg")
        series = open_series(reading.data, self.limits)
        return encode_seg(series, found.classes, self.selection.manifest.task, receipt, "binary")

    def observe(self, reading: PreparedScan, found: Segmentation, graph: LoadedGraph) -> Observed:
        """What is observed of an answer that is not encoded."""
        seen, mask = self._seen(reading, found)
        return self._observed(graph, reading, seen, found.shift, mask)

    def _seen(self, reading: PreparedScan, found: Segmentation) -> tuple[tuple[SeenLabel, ...], str]:
        """The labels of an answer, and the digest of its mask."""
        task, voxel_ml = self.selection.manifest.task, reading.scan.voxel_volume_ml
        with self.watch.stage("observe"):
            seen = seen_labels(found.classes, task, found.confidence, voxel_ml)
            return seen, mask_digest(found.classes)

    @override
    def _check_opened(self, opened: OpenedScan) -> None:
        self._output(opened.scan)
        if opened.price is not None:
            check_volume_restorable(opened.price.grid, self.selection.manifest.task)

    @override
    def _check(self, reading: PreparedScan) -> None:
        check_answerable(reading, self.selection.manifest.task)

    def _output(self, scan: Scan) -> Output:
        options = self.options
        return choose_output(
            options.output,
            scan,
            self.selection.manifest.task,
            options.segmentation_type,
            options.compress,
            options.voxels,
            options.tolerance_mm,
        )

    def _review(self, found: Segmentation) -> Mapping[str, float | None]:
        # Read for the outputs that say it alone.
        return self.reviews.of(self.options.hospital, self.selection.offered.digest, found.confidence)

    def _report(
        self,
        found: Segmentation,
        seen: Sequence[SeenLabel],
        reading: PreparedScan,
        graph: LoadedGraph,
        output: Output,
    ) -> SegmentationReport:
        return SegmentationReport(
            labels=label_reports(seen, self._review(found), self.selection.manifest.task, found.classes.size),
            attention=found.attention,
            picked=pool_selections(found.picked),
            warnings=self._warning_texts(reading),
            shape=list(found.classes.shape),
            label_names=label_names(self.selection.manifest.task),
            centroids=centroids(found.classes, self.selection.manifest.task),
            removed=dict(found.removed),
            timing_ms=self._timing(),
            receipt=self._receipt(graph, reading, found.shift, output=output),
        )
