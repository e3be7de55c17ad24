"""Run a chosen network on a scan and build the answer, in a thread of the API or in the worker.

This base class has the headers, the receipt and the guard of every answer. Its subclasses in
`service.prediction.segmentation` and `service.prediction.classification` build the body.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from model_store.artefact import Artefact
from model_store.guard import GuardWarning
from model_store.scan import Limits, Note, Scan
from model_store.task import TaskKind
from service.catalog.network import Selection
from service.errors import ParametersContradict, ScanUnlikeTask
from service.inference.pipeline import Stopwatch
from service.inference.pool import PickUnit, PoolPick
from service.inference.sessions import GraphSession
from service.kinds import ADAPTING_ITSELF, kind_of
from service.prediction.options import ScanOptions
from service.prediction.receipt import ModelReceipt, Receipt, software

Options = TypeVar("Options", bound=ScanOptions)

# The guard's warnings and its rejection have one name.
UNLIKE_TASK = ScanUnlikeTask.slug


@dataclass(frozen=True)
class Answer:
    """The body, media type and headers of a response.

    `picked` are the entries picked from a pool, for the drift; `segmentation` is the SEG that a DICOM report
    refers to; `unlike` are the guard's warnings.
    """

    body: bytes
    media_type: str
    headers: dict[str, str]
    picked: tuple[PoolPick, ...] | None = None
    segmentation: bytes | None = None
    unlike: tuple[GuardWarning, ...] = ()


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


@dataclass
class Predictor(ABC, Generic[Options]):
    """One received scan, with its network chosen and loaded.

    `network` is what answers inside `selection`, for the receipt; `input_sha256` and `input_bytes` the digest
    and size of the bytes that were received; `whole` whether the graph takes all slices of a scan at once.
    """

    request_id: str
    options: Options
    selection: Selection
    session: GraphSession
    network: ModelReceipt
    input_sha256: str
    input_bytes: int
    limits: Limits
    watch: Stopwatch
    whole: bool = False

    # Those of the task that the network was trained for.
    KIND: ClassVar[TaskKind]

    @abstractmethod
    def make(self, data: bytes) -> Answer:
        """Run the network on the scan in `data`. Raises ScanError, StoreError, ServiceError."""

    @property
    def routing(self) -> PickUnit:
        """How a volume picks from a pool. Raises ParametersContradict for a model without a pool."""
        check_routing(self.options, self.selection.offered)
        return self.options.routing or "scan"

    def _before_running(self, scan: Scan, warnings: tuple[GuardWarning, ...]) -> None:  # noqa: ARG002 - for subclasses
        obey_guard(self.options, warnings, self.selection.manifest.task.name)

    def _warning_names(self, warnings: Sequence[GuardWarning], notes: Sequence[Note]) -> list[str]:
        """Return warning codes for the response header.

        `warnings` are the guard's, which judges the scan; `notes` are on its container and header, and have
        names of their own.
        """
        unlike = [UNLIKE_TASK] if warnings else []
        return list(dict.fromkeys([*self.selection.warnings, *(note.name for note in notes), *unlike]))

    def _warning_texts(self, warnings: Sequence[GuardWarning], notes: Sequence[Note]) -> list[str]:
        """Return what a JSON answer lists; arguments as `_warning_names`."""
        return [
            *self.selection.warnings.values(),
            *(note.text for note in notes),
            *(each.text for each in warnings),
        ]

    def _headers(
        self, warnings: Sequence[GuardWarning], notes: Sequence[Note], filename: str
    ) -> dict[str, str]:
        names = self._warning_names(warnings, notes)
        return {
            "Locum-Model": str(self.selection.offered),
            "Locum-Graph": self.session.digest,
            "Locum-Personalization": self.selection.header,
            "Locum-Warnings": str(len(self._warning_texts(warnings, notes))),
            **({"Locum-Warning-Names": ", ".join(names)} if names else {}),
            "Server-Timing": self.watch.header(),
            "Content-Disposition": f'inline; filename="{filename}"',
        }

    def _receipt(self, **options: str) -> Receipt:
        """Make the receipt; `options` are the values of options that the request left out."""
        selection = self.selection
        return Receipt(
            request=self.request_id,
            input_sha256=self.input_sha256,
            input_bytes=self.input_bytes,
            model=receipt_of(selection.offered),
            network=self.network,
            graph=self.session.digest,
            personalization=selection.personalization,
            site=selection.site,
            cluster=selection.cluster,
            why=selection.why,
            options={**self.options.model_dump(), **options},
            provider=self.session.provider,
            **software(),
        )

    def _timing(self) -> dict[str, float]:
        return {name: round(duration, 3) for name, duration in self.watch.stages.items()}


def receipt_of(artefact: Artefact) -> ModelReceipt:
    """Describe a published artefact in a receipt."""
    return ModelReceipt(name=str(artefact), digest=artefact.digest)
