"""From a scan and a chosen network to the answer, in a thread of the API or in the worker.

What every answer has, whatever is asked of a scan: its headers, its receipt, and the guard, which may refuse.
`service.prediction.segmentation` and `service.prediction.classification` say what the answer is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

from starlette.background import BackgroundTask
from starlette.responses import Response

from model_store.artefact import Artefact
from model_store.manifest import GRAPH, SsfPoolManifest
from model_store.scan import Limits, Scan
from model_store.task import TaskKind
from service.catalog.network import Selection
from service.catalog.version import contradiction
from service.context import ServiceContext
from service.http.problems import Problem
from service.http.uploads.spool import Upload
from service.inference.pipeline import Stopwatch
from service.inference.pool import PickUnit, PoolPick
from service.inference.sessions import GraphSession
from service.prediction.options import ScanOptions
from service.prediction.receipt import ModelReceipt, Receipt, software
from service.serving import key_usage
from service.settings import scan_limits

Options = TypeVar("Options", bound=ScanOptions)

# The one name of all that the guard says, as a warning and as a refusal.
UNLIKE_TASK = "scan-unlike-task"


@dataclass(frozen=True)
class Answer:
    """A response's body, its media type and its headers; what was picked from a pool, for the drift."""

    body: bytes
    media_type: str
    headers: dict[str, str]
    picked: tuple[PoolPick, ...] | None = None


def obey_guard(options: ScanOptions, warnings: Sequence[str], task: str) -> None:
    """Raises Problem 422 for a scan that the guard warns of, if the request said to refuse it."""
    if warnings and options.guard == "refuse":
        raise Problem(
            422,
            UNLIKE_TASK,
            "The scan does not look like the task",
            f"{'; '.join(warnings)}. Send a scan of task '{task}', or guard=warn to have it answered all "
            "the same.",
            warnings=list(warnings),
        )


def check_routing(options: ScanOptions, offered: Artefact) -> None:
    """Raises Problem 422 for a request that says how to pick from a pool where there is none."""
    if options.routing is not None and not isinstance(offered.manifest, SsfPoolManifest):
        raise contradiction(
            f"`routing` belongs to an ssf-pool, and '{offered}' is of kind {offered.manifest.kind}; "
            "leave it out."
        )


@dataclass
class Predictor(ABC, Generic[Options]):
    """One scan, once its bytes are there and its network is chosen and loaded.

    `network` is what answers inside `selection`, for the receipt; `input_sha256` the digest of the bytes.
    """

    request_id: str
    options: Options
    selection: Selection
    session: GraphSession
    network: ModelReceipt
    input_sha256: str
    limits: Limits
    watch: Stopwatch
    _size: int = field(default=0, init=False)

    # Of the task that the network was trained for.
    KIND: ClassVar[TaskKind]

    def make(self, data: bytes) -> Answer:
        """Run the network on the scan in `data`. Raises ScanError, StoreError, Problem."""
        self._size = len(data)
        return self._answer(data)

    @property
    def routing(self) -> PickUnit:
        """How a volume picks from a pool. Raises Problem 422 where one is asked for and there is none."""
        check_routing(self.options, self.selection.offered)
        return self.options.routing or "scan"

    @abstractmethod
    def _answer(self, data: bytes) -> Answer: ...

    def _before_running(self, scan: Scan, warnings: tuple[str, ...]) -> None:  # noqa: ARG002 - for subclasses
        obey_guard(self.options, warnings, self.selection.manifest.task.name)

    def _warning_names(self, warnings: Sequence[str]) -> list[str]:
        """Short names of what to beware of, `warnings` being the guard's: most forms have no sentences."""
        return [*self.selection.warnings, *([UNLIKE_TASK] if warnings else [])]

    def _headers(self, warnings: Sequence[str], filename: str) -> dict[str, str]:
        names = self._warning_names(warnings)
        return {
            "Locum-Model": str(self.selection.offered),
            "Locum-Graph": self.session.digest,
            "Locum-Personalization": self.selection.header,
            "Locum-Warnings": str(len(self.selection.warnings) + len(warnings)),
            **({"Locum-Warning-Names": ", ".join(names)} if names else {}),
            "Server-Timing": self.watch.header(),
            "Content-Disposition": f'inline; filename="{filename}"',
            "Cache-Control": "no-store",
        }

    def _receipt(self, **options: str) -> Receipt:
        """With `options` in place of what the request left open."""
        selection = self.selection
        return Receipt(
            request=self.request_id,
            input_sha256=self.input_sha256,
            input_bytes=self._size,
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


def answer_upload(
    kind: type[Predictor[Options]],
    context: ServiceContext,
    request_id: str,
    options: Options,
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
    answer = kind(
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
    noting = None
    if answer.picked is not None and options.hospital is not None:
        # Once the answer is sent: neither it nor the next scan waits for the database.
        pool, picked = selection.offered, answer.picked
        noting = BackgroundTask(key_usage.note, context.database, options.hospital, pool, picked)
    return Response(answer.body, headers=answer.headers, media_type=answer.media_type, background=noting)


def receipt_of(artefact: Artefact) -> ModelReceipt:
    """A published artefact, for a receipt."""
    return ModelReceipt(name=str(artefact), digest=artefact.digest)
