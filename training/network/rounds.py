"""The tasks of a round: each hospital's part, the files that travel, and when the round ends.

A round's tasks stay current until each hospital reported or its time is over. A hospital that is killed and
started again asks for its task again and repeats it from its own memory, with the same result. A report
counts only for the task that is current.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from training.algorithm import Phase, Plan
from training.engine.tensorfile import check_tensors
from training.engine.worker import Delivery, Failure, Task
from training.errors import TrainingError
from training.network.cell import CHUNK, Rejected, printable
from training.network.messages import Alive, Next, Report, Slice, TaskMessage, Written
from training.network.sessions import Sessions
from training.privacy import Spent
from training.progress.format import duration

POLL_S = 1.0  # between looks at the clock
_PATIENCE_S = 30.0  # before the operator sees a warning that a hospital is missing


@dataclass(frozen=True)
class RoundLimits:
    """When a round ends without a hospital.

    `quorum`: hospitals that must deliver, None for all that are not revoked. With fewer uploads that the
    server accepts the round fails, and the run can be resumed. `deadline`: seconds after which hospitals that
    have not delivered are dropped from the round, once a quorum has; None waits for all. `silence`: seconds
    after which one that is not heard is dropped. `upload_bytes`: the largest upload of one hospital in a
    round.
    """

    deadline: float | None = None
    quorum: int | None = None
    silence: float = 86_400.0
    upload_bytes: int = 4 * 2**30


NO_DEADLINE = RoundLimits()


@dataclass
class Part:
    """One hospital's part of the current round. A request that writes its files holds `writing`."""

    id: str
    task: Task
    phase: Phase
    answer: Delivery | Failure | None = None
    received: dict[str, int] = field(default_factory=dict)
    writing: threading.Lock = field(default_factory=threading.Lock)

    def download(self, group: str) -> Path:
        """The file of a group that the hospital receives. Raises Rejected for another group."""
        path = (self.task.received or {}).get(group)
        if path is None:
            raise Rejected(f"there is no download '{group[:64]}' in task {self.id}")
        return path

    def upload(self, group: str) -> Path:
        """The file of a group that the hospital sends. Raises Rejected for another group."""
        if group not in {declared.name for declared in self.phase.uploads}:
            raise Rejected(f"phase '{self.phase.name}' uploads no group '{group[:64]}'")
        assert self.task.upload is not None
        return self.task.upload.with_name(f"{self.task.upload.name}-{group}")

    def message(self) -> TaskMessage:
        """The task as its hospital receives it."""
        task = self.task
        assert task.step is not None
        sizes = {name: path.stat().st_size for name, path in (task.received or {}).items()}
        return TaskMessage(
            id=self.id, step=task.step, round=task.round, slot=task.slot, to=task.to, downloads=sizes
        )


class Rounds:
    """The current round. `labels` are the task's, or its classes; `sessions` says which hospitals are there.

    `quorum` is how many must deliver now. `working` hears how far a hospital's step is, see `Operator`.

    `changed` is the operator's lock: it guards which parts are current and their answers, and is notified of
    every answer. `Part.writing` guards a part's files. It is taken before `changed`, never after it.
    """

    def __init__(
        self,
        plan: Plan,
        labels: frozenset[str],
        limits: RoundLimits,
        sessions: Sessions,
        changed: threading.Condition,
        quorum: Callable[[], int],
    ) -> None:
        self._plan = plan
        self._labels = labels
        self._limits = limits
        self._sessions = sessions
        self._changed = changed
        self._quorum = quorum
        self._parts: dict[str, Part] = {}
        self.working: Callable[[str, int, int], None] = lambda *_: None

    def run(self, tasks: Sequence[Task], warn: Callable[[str], None]) -> Iterator[Delivery | Failure]:
        """Give the hospitals their tasks, and yield their results in task order."""
        started = time.monotonic()
        try:
            self.begin(tasks)
            for task in tasks:
                yield self._await(task.site, started, warn)
        finally:
            with self._changed:
                ended, self._parts = self._parts, {}
            for part in ended.values():
                with part.writing:
                    pass  # the next round writes the same files

    def begin(self, tasks: Sequence[Task]) -> None:
        """Make these tasks current. Those of hospitals that left have failed."""
        with self._changed:
            self._parts = {task.site: self._part(task) for task in tasks}
        self._sessions.wake(*(task.site for task in tasks))

    def fail(self, site: str, reason: str) -> None:
        """End a hospital's part without its result, unless it has delivered."""
        with self._changed:
            if part := self._parts.get(site):
                self._answer(part, Failure(site, reason))

    def next(self, site: str) -> Next:
        """What a hospital has to do, if there is anything."""
        with self._changed:
            part = self._parts.get(site)
            if part is None or part.answer is not None:
                return Next()
        return Next(task=part.message())

    def alive(self, site: str, said: Alive) -> None:
        """Take note of how far a step is. Raises Rejected for a task that is not current."""
        self._current(site, said.task)
        self._sessions.beat(site)
        self.working(site, said.done, said.planned)

    def read(self, site: str, said: Slice) -> bytes:
        """A chunk of a download. Raises Rejected."""
        path = self._current(site, said.task).download(said.group)
        with path.open("rb") as file:
            file.seek(said.offset)
            return file.read(CHUNK)

    def write(self, site: str, said: Slice, body: bytes) -> Written:
        """Take a chunk of an upload. Raises Rejected; after too many bytes the hospital's part has failed."""
        with self._writing(site, said.task) as part:
            path = part.upload(said.group)
            others = sum(size for name, size in part.received.items() if name != said.group)
            if said.offset + len(body) > said.total:
                raise Rejected(f"the chunk ends behind the upload's {said.total} bytes")
            if said.total + others > self._limits.upload_bytes:
                reason = f"its upload has more than the {self._limits.upload_bytes} bytes that a round allows"
                self._answer(part, Failure(site, reason))  # the same step would have the same size
                raise Rejected(reason, "too large")
            at = 0 if said.offset == 0 else part.received.get(said.group, 0)
            if said.offset == at:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("r+b" if path.exists() else "wb") as file:
                    file.truncate(at)
                    file.seek(at)
                    file.write(body)
                at += len(body)
            part.received[said.group] = at
        return Written(at=at)

    def done(self, site: str, said: Report) -> None:
        """Take a hospital's report, after checking it and its files. Raises Rejected."""
        with self._writing(site, said.task) as part:
            if said.failure is None:
                self._answer(part, self._checked(part, said))
            else:
                self._answer(part, Failure(site, printable(said.failure or "no reason was given")))

    def _answer(self, part: Part, answer: Delivery | Failure) -> None:
        """End a part; its first answer counts."""
        with self._changed:
            if part.answer is None:
                part.answer = answer
                self._changed.notify_all()

    def _part(self, task: Task) -> Part:
        assert task.step is not None
        phase = self._plan[task.step]
        assert isinstance(phase, Phase)
        gone = self._sessions.why_left(task.site)
        id_ = f"{task.step}-{task.round}-{secrets.token_hex(4)}"
        return Part(id_, task, phase, None if gone is None else Failure(task.site, gone))

    def _await(self, site: str, started: float, warn: Callable[[str], None]) -> Delivery | Failure:
        deadline = self._limits.deadline
        warned = False
        with self._changed:
            part = self._parts[site]
            while part.answer is None:
                waited = time.monotonic() - started
                delivered = sum(isinstance(p.answer, Delivery) for p in self._parts.values())
                quorum = min(self._quorum(), len(self._parts))
                if deadline is not None and waited >= deadline and delivered >= quorum:
                    part.answer = Failure(site, f"did not deliver within {deadline:g} s")
                    break
                quiet = self._sessions.silence(site, started)
                if quiet >= self._limits.silence:
                    part.answer = Failure(site, f"was not heard for {duration(quiet)} (--silence)")
                    break
                if not warned and quiet >= _PATIENCE_S:
                    warned = True
                    since = datetime.now(UTC) - timedelta(seconds=quiet)
                    warn(
                        f"{site} is away: not heard since {since:%H:%M:%S} UTC. The round waits, and it "
                        "repeats its step when it is back"
                    )
                left = POLL_S if deadline is None else min(POLL_S, max(deadline - waited, 0.05))
                self._changed.wait(left)
            return part.answer

    def _current(self, site: str, task: str) -> Part:
        with self._changed:
            part = self._parts.get(site)
            if part is None or part.id != task or part.answer is not None:
                raise Rejected(self._why_stale(site, task), "stale")
            return part

    def _why_stale(self, site: str, id_: str) -> str:
        """Say which round a task was of, why that went on without it, and which one is in progress."""
        step, _, rest = id_.partition("-")
        round_ = rest.partition("-")[0]
        if not (step.isdecimal() and round_.isdecimal() and int(step) < len(self._plan)):
            return f"there is no task '{id_[:64]}'"
        task = Task(site, int(step), int(round_))
        part, current = self._parts.get(site), next(iter(self._parts.values()), None)
        if part is not None and part.id == id_ and isinstance(part.answer, Failure):
            return f"{self._named(task)} goes on without this hospital, which {part.answer.reason}"
        if part is not None and (part.task.step, part.task.round) == (task.step, task.round):
            return f"{self._named(task)} has another task here: it began again, or was delivered already"
        now = "" if current is None else f"; {self._named(current.task)} is in progress"
        return f"it is late: {self._named(task)} is over{now}"

    def _named(self, task: Task) -> str:
        phase = self._plan[task.step or 0]
        return f"{phase.name} {task.round + 1}"

    @contextmanager
    def _writing(self, site: str, task: str) -> Iterator[Part]:
        """Give the part of the current task, to which no other request writes meanwhile.

        The engine then reads what `done` checked. Raises Rejected for a task that is not current.
        """
        with self._current(site, task).writing:
            yield self._current(site, task)

    def _checked(self, part: Part, said: Report) -> Delivery | Failure:
        """Check a report against the plan and its files against their headers, before a tensor is read."""
        task, declared = part.task, {group.name: group for group in part.phase.uploads}
        essential = {name for name, group in declared.items() if group.essential}
        if {*said.groups} | {*said.withheld} - {"metrics"} != {*declared} or not essential <= {*said.groups}:
            return Failure(task.site, f"expected the groups {', '.join(declared)}, or a note that one stays")
        if said.slot not in {task.slot, task.to}:
            return Failure(task.site, f"expected memory slot {task.slot} or {task.to}, found {said.slot}")
        unknown = {name.partition("/")[2] for name in said.metrics} - {"", *self._labels}
        if unknown:
            return Failure(
                task.site, f"expected metrics of the task's labels, found {printable(min(unknown))!r}"
            )
        files = {name: part.upload(name) for name in said.groups}
        sent: dict[str, int] = {}
        for name, path in files.items():
            if not path.exists() or path.stat().st_size != part.received.get(name, -1):
                return Failure(task.site, f"group '{name}' was not uploaded completely")
            try:
                sent[name] = check_tensors(path)
            except TrainingError as error:
                return Failure(task.site, f"group '{name}': {error}")
        privacy = {name: Spent(**cost.model_dump()) for name, cost in said.privacy.items() if name in files}
        return Delivery(
            task.site, files, sent, said.weight, said.metrics, said.withheld, said.slot, said.seconds, privacy
        )
