"""Run a chosen network on a scan and build the answer, in a thread of the API or in the worker.

This base class has the headers, the receipt and the guard of every answer. Its subclasses in
`service.prediction.segmentation` and `service.prediction.classification` build the body.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Generic, TypeVar

from model_store.artefact import Artefact
from model_store.digest import sha256
from model_store.guard import GuardWarning
from model_store.lens import LENS
from model_store.manifest import GRAPH
from model_store.scan import Limits, Note
from model_store.task import TaskKind
from service.about import locum_version
from service.catalog.network import Selection
from service.errors import ParametersContradict, ScanUnlikeTask
from service.inference.pipeline import (
    OpenedScan,
    PreparedScan,
    Segmentation,
    Stopwatch,
    open_scan,
    prepare_opened,
    warnings_of,
)
from service.inference.pool import PoolPick
from service.inference.sessions import GraphSession
from service.inference.shift import ShiftAt
from service.inference.volumes import Between
from service.kinds import ADAPTING_ITSELF, kind_of
from service.observation import Observed, Reviews, SeenLabel, acquisition_of, spacing_of
from service.prediction.options import ScanOptions
from service.prediction.receipt import ModelReceipt, Receipt, software

Options = TypeVar("Options", bound=ScanOptions)

# The guard's warnings and its rejection have one name.
UNLIKE_TASK = ScanUnlikeTask.slug


@dataclass(frozen=True)
class EncodedAnswer:
    """The body, media type and headers of a response.

    `observed` is what is stored of it. `picked` are the entries picked from a pool, for the drift;
    `segmentation` is the SEG that a DICOM report refers to; `unlike` are the guard's warnings; `found` is
    what the body was encoded from, of a mask.
    """

    body: bytes
    media_type: str
    headers: dict[str, str]
    observed: Observed
    picked: tuple[PoolPick, ...] | None = None
    segmentation: bytes | None = None
    unlike: tuple[GuardWarning, ...] = ()
    found: Segmentation | None = None


def obey_guard(options: ScanOptions, warnings: Sequence[GuardWarning], task: str) -> None:
    """Raise ScanUnlikeTask if the request rejects scans that the guard warns of so."""
    reasons = [
        each.text
        for each in warnings
        if options.guard == "refuse" or (options.guard == "auto" and each.gross)
    ]
    if reasons:
        raise ScanUnlikeTask(
            f"{'; '.join(reasons)}. Send a scan of task '{task}', or guard=warn to have it answered all "
            "the same.",
            warnings=reasons,
        )


def check_routing(options: ScanOptions, offered: Artefact) -> None:
    """Raise ParametersContradict if the request has pool options and the model has no pool."""
    if options.routing is not None and kind_of(offered).adapts_itself_by is None:
        raise ParametersContradict(
            f"`routing` belongs to {ADAPTING_ITSELF}, and '{offered}' is of kind {offered.manifest.kind}; "
            "leave it out."
        )


@dataclass(frozen=True)
class LoadedGraph:
    """A graph that answers, loaded.

    `network` is the network that it is of, for the receipt; `model` the name of the model that it answers
    for, of which hospitals are assigned versions; `whole` whether it takes all slices of a scan at once.
    """

    session: GraphSession
    network: ModelReceipt
    model: str
    whole: bool = False


@dataclass
class Predictor(ABC, Generic[Options]):
    """One received scan, with its network chosen.

    `input_sha256` and `input_bytes` are digest and size of the bytes that were received. `reviews` rank the
    answer among the hospital's own. `between` is looked at between two steps.
    """

    request_id: str
    options: Options
    selection: Selection
    input_sha256: str
    input_bytes: int
    limits: Limits
    watch: Stopwatch
    reviews: Reviews
    between: Between = field(default_factory=Between)

    # Those of the task that the network was trained for.
    KIND: ClassVar[TaskKind]

    def read(self, data: bytes) -> PreparedScan:
        """`open`, then `prepare`: every rejection of a scan or its options is raised here."""
        return self.prepare(self.open(data))

    def open(self, data: bytes) -> OpenedScan:
        """Decode the scan in `data`, and price it.

        Raises:
            ScanError: it cannot be read, or costs more than is allowed.
            PredictionError, ParametersContradict: the request's options do not fit the scan or the model.
        """
        check_routing(self.options, self.selection.offered)
        opened = open_scan(data, self.selection.manifest.task, self.limits, self.watch)
        if opened.price is not None and self.selection.sees_through_lens:
            fitted = self.selection.fingerprint is not None
            price = opened.price.through_lens(self.selection.manifest.task, fitted=fitted)
            opened = replace(opened, price=price)
        self._check_opened(opened)
        return opened

    def prepare(self, opened: OpenedScan) -> PreparedScan:
        """Prepare the scan for the network, and compare it with the task's.

        Raises:
            ScanError: it does not fit the task.
            PredictionError: the guard refuses it.
        """
        reading = prepare_opened(
            opened,
            self.selection.manifest,
            self.watch,
            self.between.look,
            lens=self.selection.lens(),
        )
        self._check(reading)
        obey_guard(self.options, reading.warnings, self.selection.manifest.task.name)
        return reading

    def check_outline(self, opened: OpenedScan) -> None:
        """What can be said of a volume that a job will prepare.

        Raises:
            ScanError: it does not fit the task.
            PredictionError: the guard refuses it.
        """
        manifest = self.selection.manifest
        obey_guard(self.options, warnings_of(opened, manifest), manifest.task.name)

    @abstractmethod
    def make(self, reading: PreparedScan, graph: LoadedGraph) -> EncodedAnswer:
        """Run the network on the scan. Raises StoreError, ServiceError."""

    def _check_opened(self, opened: OpenedScan) -> None:
        """Raise ScanError or PredictionError if this scan cannot have this answer, as far as is known."""

    def _check(self, reading: PreparedScan) -> None:
        """The same, of the prepared scan."""

    def _warning_names(self, reading: PreparedScan, more: Sequence[Note] = ()) -> list[str]:
        """Return warning codes for the response header, each once.

        The guard's warnings have one, and judge the scan. Its notes, and `more` of them for this answer, are
        on its container and header, and have names of their own.
        """
        unlike = [UNLIKE_TASK] if reading.warnings else []
        notes = (note.name for note in (*reading.scan.notes, *reading.remarks, *more))
        return list(dict.fromkeys([*self.selection.warnings, *notes, *unlike]))

    def _warning_texts(self, reading: PreparedScan, more: Sequence[Note] = ()) -> list[str]:
        """Return what a JSON answer lists; arguments as `_warning_names`."""
        return [
            *self.selection.warnings.values(),
            *(note.text for note in (*reading.scan.notes, *reading.remarks, *more)),
            *(each.text for each in reading.warnings),
        ]

    def _headers(
        self, graph: LoadedGraph, reading: PreparedScan, filename: str, more: Sequence[Note] = ()
    ) -> dict[str, str]:
        names = self._warning_names(reading, more)
        return {
            "Locum-Model": str(self.selection.offered),
            "Locum-Graph": graph.session.digest,
            "Locum-Personalization": self.selection.header,
            "Locum-Warnings": str(len(self._warning_texts(reading, more))),
            **({"Locum-Warning-Names": ", ".join(names)} if names else {}),
            "Server-Timing": self.watch.header(),
            "Content-Disposition": f'inline; filename="{filename}"',
        }

    def _observed(
        self,
        graph: LoadedGraph,
        reading: PreparedScan,
        labels: tuple[SeenLabel, ...],
        shift: tuple[float, ShiftAt] | None,
        mask: str | None = None,
    ) -> Observed:
        scan, stages = reading.scan, self.watch.stages
        acquisition = scan.acquisition
        said = None if acquisition is None else acquisition.device or None
        measured, at = (None, None) if shift is None else shift
        return Observed(
            model=graph.model,
            version=self.selection.offered.digest,
            graph=graph.session.digest,
            scan=self.input_sha256,
            size=scan.grid,
            seconds=round(sum(stages.values()) - stages.get("wait", 0.0), 3) / 1000,
            precision=self.selection.precision,
            provider=graph.session.provider,
            labels=labels,
            locum=locum_version()[:32],
            usual=self._is_usual(),
            spacing=spacing_of(scan),
            scanner=self.options.scanner or said,
            series=None if acquisition is None else acquisition.series or None,
            acquisition=acquisition_of(scan),
            shift=measured,
            shift_at=at,
            unlike=len(reading.warnings),
            warnings=tuple(self._warning_names(reading)),
            mask=mask,
            choice=self._choice(graph),
        )

    def _choice(self, graph: LoadedGraph) -> dict[str, str | None] | None:
        """What `chosen_before` makes the same answer of; None of a graph that is no version's."""
        if graph.session.digest != self.selection.model.manifest.files[GRAPH].sha256:
            return None
        kept = {**self.selection.kept, "routing": self.options.routing}
        # In words, and the same for all: `why` would be most of the row.
        return {name: value for name, value in kept.items() if value is not None and name != "why"}

    def _is_usual(self) -> bool:
        """Whether the request left it to the service which network answers."""
        options = self.options
        named = (options.site, options.routing, getattr(options, "cluster", None))
        return getattr(options, "personalization", "auto") == "auto" and named == (None, None, None)

    def _receipt(
        self,
        graph: LoadedGraph,
        reading: PreparedScan,
        shift: tuple[float, ShiftAt] | None,
        **options: str,
    ) -> Receipt:
        """Make the receipt; `options` are the values of options that the request left out."""
        selection = self.selection
        if selection.fingerprint is None:
            entry = selection.manifest.files.get(LENS)
            lens = None if entry is None else entry.sha256
        else:
            lens = None if reading.lens is None else sha256(reading.lens.to_bytes())
        return Receipt(
            request=self.request_id,
            input_sha256=self.input_sha256,
            input_bytes=self.input_bytes,
            model=receipt_of(selection.offered),
            network=graph.network,
            graph=graph.session.digest,
            precision=selection.precision,
            lens=lens,
            shift=None if shift is None else shift[0],
            shift_at=None if shift is None else shift[1],
            personalization=selection.personalization,
            site=selection.site,
            cluster=selection.cluster,
            keep_largest=[*selection.manifest.task.keep_largest],
            why=selection.why,
            options={**self.options.model_dump(), **options},
            provider=graph.session.provider,
            gpu=graph.session.gpu,
            **software(),
        )

    def _timing(self) -> dict[str, float]:
        return {name: round(duration, 3) for name, duration in self.watch.stages.items()}


def receipt_of(artefact: Artefact) -> ModelReceipt:
    """Describe a published artefact in a receipt."""
    return ModelReceipt(name=str(artefact), digest=artefact.digest)
