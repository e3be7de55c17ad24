"""The hospital's side: join a run, run its steps, and send what the hospital's own policy allows.

The hospital only calls out. It builds the method from its own installed Locum by name and configuration,
reads its own folder, and keeps its memory, its key and a log of what left in `state`:

STATE/RUN/sites/NAME/   memory, key and failures.log of one run (see training.engine.folder)
STATE/RUN/sent.jsonl    one line per step, before it is sent: groups and bytes that leave, and what stays
STATE/RUN/files/        tensors in transit; overwritten every round
STATE/releases.json     what left with noise in every run, by which the policy's epsilon is limited

A process takes part in one run, the first that it joins, and in the run that was planned by it. An operator
who ended a run without a word cannot start another with the same process; a person, or a process manager,
starts the command again.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from model_store.durable import naming
from model_store.task import Task as ModelTask
from training.algorithm import Algorithm, Phase, Plan
from training.config import RunConfig, parse
from training.data.cases import Federation, Site, data_warnings
from training.data.federation import load_site
from training.data.segmentation.layout import CASES, read_rows
from training.engine.client import RunEnvironment
from training.engine.device import problem_of
from training.engine.egress import SiteSpec, may_take_part
from training.engine.folder import RELEASES, locked
from training.engine.tensorfile import check_tensors
from training.engine.worker import Delivery, Failure, Task, Worker
from training.errors import ConfigurationError, SiteFailed, TrainingError
from training.methods.registry import method as find_method
from training.network.cell import CHUNK, Cell, Rejected, Unreachable
from training.network.kits import Kit
from training.network.messages import (
    PROTOCOL,
    Announcement,
    Invitation,
    Leave,
    Message,
    Next,
    Report,
    Session,
    Slice,
    SpentMessage,
    TaskMessage,
    Welcome,
    Written,
    configuration_digest,
    differences,
    pack,
    plan_digest,
    unpack,
    versions,
)
from training.network.policy import Policy
from training.planning_round import METHOD as PLAN
from training.privacy import Spent
from training.run import Run

SENT_FILE = "sent.jsonl"
_TIMEOUT_S = 60.0  # for the reply to one request, at first; a chunk of a file on a slow line takes most
_LONGEST_S = 600.0  # for it on a slow line: a chunk at 7 kB/s
_IDLE_S = 2.0  # between questions for a task, if the operator does not wake the hospital
_RETRY_S = 1.0
_ENDS = frozenset({"revoked", "mismatch", "stranger", "replaced", "rejected"})  # a retry cannot help


@dataclass(frozen=True)
class Sent:
    """What left the hospital after a step, in bytes by group, and what stayed.

    `total` is the sum of the run. `privacy` says what the groups that left with noise cost so far.
    """

    phase: str
    round: int
    groups: Mapping[str, int]
    metrics: tuple[str, ...]
    withheld: tuple[str, ...]
    total: int
    seconds: float
    privacy: Mapping[str, Spent]


class Watcher(Protocol):
    """Shows a person at the hospital what happens."""

    def waiting(self, reason: str) -> None:
        """Handle a wait for the operator."""

    def joined(self, invitation: Invitation, plan: Plan, spec: SiteSpec, patients: str) -> None:
        """Handle the start of a session: what will leave by the hospital's policy.

        `patients` says how many patients were counted, and by which rule.
        """

    def warning(self, message: str) -> None:
        """Handle a warning about the hospital's data, before a step."""

    def started(self, phase: Phase, round: int) -> None:
        """Handle the start of a step."""

    def sent(self, sent: Sent) -> None:
        """Handle the end of a step."""

    def refused(self, phase: Phase, round: int, reason: str) -> None:
        """Handle a step that sent nothing."""

    def dropped(self, reason: str) -> None:
        """Handle a step that the operator does not count."""


@dataclass(frozen=True)
class _Folder:
    """The hospital's folder, read for the operator's task.

    `listed` says that cases.csv names the patient of every file. Otherwise `rule`, the policy's expression,
    finds the patient in a file's name; without it the operator's task decides what a patient is.
    """

    task: ModelTask
    rule: str | None
    site: Site[Any]
    listed: bool

    @property
    def patients(self) -> str:
        """Say how many patients there are, and by which rule."""
        if self.listed:
            rule = f"named in {CASES}"
        elif self.rule is not None:
            rule = f"by the policy's {self.rule!r}"
        elif self.task.patient is not None:
            rule = f"by the operator's {self.task.patient!r}"
        else:
            rule = "one per file"
        return f"{len(self.site.patients)} patients ({rule})"

    def problem(self, policy: Policy) -> str | None:
        """Say why a bound of the policy on the number of patients would not be the hospital's own."""
        if self.listed:
            return None
        if self.rule != policy.patient:
            return "patient: the policy's rule changed since the folder was read; start this process again"
        if self.rule is None and policy.bounds.minimum_patients > 1:
            return (
                "bounds.minimum_patients: the operator's task would decide here what a patient is; name the "
                f"patient of every file in {CASES}, or set `patient` in the policy"
            )
        return None


@dataclass(frozen=True)
class _Prepared:
    """A run that this hospital can take part in."""

    invitation: Invitation
    algorithm: Algorithm
    worker: Worker
    data: _Folder
    spec: SiteSpec
    announcement: Announcement
    folder: Path
    log: _SentLog
    warnings: tuple[str, ...]


class _SentLog:
    """The hospital's log of what left in a run. `total` is the sum of its bytes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            os.truncate(path, len(whole))  # the line that a killed process had begun; nothing of it left
        self.total = sum(sum(json.loads(line)["sent"].values()) for line in whole.splitlines())

    def add(self, phase: Phase, round_: int, answer: Delivery) -> None:
        """Append a line on what is about to leave."""
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "phase": phase.name,
            "round": round_ + 1,
            "sent": dict(answer.sent),
            "metrics": dict(answer.metrics),
            "withheld": list(answer.withheld),
            "privacy": {name: asdict(cost) for name, cost in answer.privacy.items()},
        }
        with self._path.open("a") as log:
            log.write(json.dumps(line) + "\n")
        self.total += sum(answer.sent.values())


class Hospital:
    """One hospital's process.

    `data` is its folder, laid out as a site of a federation; `policy` the path of its policy; `state` its own
    folder for memories and logs; `store` a local model store, for methods that adapt a backbone; `device`
    where it computes, by default as the operator's run does.
    """

    def __init__(
        self,
        kit: Kit,
        data: Path,
        policy: Path,
        state: Path,
        watcher: Watcher,
        store: Path | None = None,
        device: str | None = None,
    ) -> None:
        self._kit = kit
        self._data = data
        self._policy_file = policy
        self._policy = Policy.read(policy)
        self._state = state
        self._watcher = watcher
        self._store = store
        self._device = device
        self._awake = threading.Event()
        self._cell = Cell(kit, self._notified)
        self._folder: _Folder | None = None
        self._prepared: _Prepared | None = None
        self._session: str | None = None
        self._joined: str | None = None
        self._finished: str | None = None  # a run that another one follows
        self._patience_s = _TIMEOUT_S

    def run(self) -> str:
        """Take part until the operator's run ends; returns the operator's words on its end.

        Raises TrainingError when the hospital cannot or must not take part: its folder, its policy, a version
        or a digest that differs, a certificate that the operator rejects, another run than the first, or
        another process that uses the same state folder. After a KeyboardInterrupt the hospital leaves the
        run.
        """
        # Another process would write the same memory and uploads, and count its own releases only.
        with locked(self._state, f"{self._state} is in use: another process of this hospital runs here"):
            self._cell.start()
            try:
                return self._take_part()
            except KeyboardInterrupt:
                self._leave("stopped by the hospital")  # while the cell is still connected
                raise
            finally:
                self._cell.stop()

    def _take_part(self) -> str:
        while True:
            try:
                self._session = self._session or self._join()
                end = self._work(self._session)
            except Rejected as error:
                if error.code in _ENDS:
                    raise TrainingError(f"the operator rejected this hospital: {error}") from error
                self._session = None
                continue
            if not end.follows:
                return end.over or ""
            self._watcher.waiting(f"{end.over}; another run follows")
            self._finished, self._joined, self._session = self._joined, None, None
            self._prepared = None

    def _leave(self, reason: str) -> None:
        """Tell the operator, if it can be reached, that this hospital stops."""
        if self._session is not None:
            with suppress(Unreachable, Rejected):  # the round's deadline tells the operator
                self._cell.request("leave", pack(Leave(session=self._session, reason=reason)), 5)

    def _notified(self, peer: str, topic: str, content: bytes) -> bytes:  # noqa: ARG002
        if topic == "wake":
            self._awake.set()
        return b""

    def _join(self) -> str:
        while (invitation := unpack(Invitation, self._request("invite", b""))[0]).run == self._finished:
            time.sleep(_RETRY_S)  # the operator has not ended it yet
        if self._joined not in (None, invitation.run):
            raise TrainingError(
                f"the operator: expected run {str(self._joined)[:16]}, which this process joined and of "
                f"which it did not hear the end, found run {invitation.run[:16]}; start this command again "
                "to join it"
            )
        before = self._prepared
        same = (
            before is not None
            and before.invitation.model_copy(update={"nonce": invitation.nonce}) == invitation
        )
        with suppress(ConfigurationError):  # then no step runs, either
            self._policy = Policy.read(self._policy_file)
        prepared = before if same and before is not None else self._prepare(invitation)
        prepared = replace(prepared, spec=replace(prepared.spec, **_of_policy(self._policy)))
        self._prepared = prepared
        nonce = invitation.nonce
        said = {"nonce": nonce, "signature": self._sign(nonce), **_announced(self._policy)}
        signed = prepared.announcement.model_copy(update=said)
        welcome, _ = unpack(Welcome, self._ask("join", signed))
        self._joined = invitation.run
        if not same or before is None or prepared.spec != before.spec:
            self._watcher.joined(invitation, prepared.algorithm.plan(), prepared.spec, prepared.data.patients)
            for warning in prepared.warnings:
                self._watcher.warning(warning)
        return welcome.session

    def _sign(self, nonce: str) -> str:
        from nvflare.lighter.utils import load_private_key_file, sign_content

        signature: str = sign_content(nonce, load_private_key_file(str(self._kit.key)))
        return signature

    def _prepare(self, invitation: Invitation) -> _Prepared:
        """Check what the operator would run, then this hospital's folder. Raises TrainingError."""
        policy = self._policy
        self._check(invitation, policy)
        task, settings = _task(invitation), _settings(invitation)
        chosen = find_method(invitation.method)
        config = parse(chosen.config, invitation.config, f"the operator's configuration of {chosen.name}")
        config = config.at_hospital(self._store)
        data = self._read(task, policy.patient)
        if problem := data.problem(policy):
            raise ConfigurationError("this hospital cannot take part in the operator's run", [problem])
        site = data.site
        run = Run(Federation(self._data, task, (site,), False, ""), chosen.name, config, settings)
        algorithm, (split,), (spec,) = run.algorithm(), run.sites(), run.specs()
        spec = replace(spec, **_of_policy(policy))
        ours = {
            "plan_digest": plan_digest(algorithm),
            "configuration_digest": configuration_digest(chosen.name, config, invitation.settings, task),
        }
        problems = [
            f"{name}: expected {value[:12]}, found {getattr(invitation, name)[:12]} at the operator"
            for name, value in ours.items()
            if value != getattr(invitation, name)
        ]
        if problems:
            raise ConfigurationError("the operator's Locum would run something else", problems)
        folder = self._state / invitation.run[:16]
        folder.mkdir(parents=True, exist_ok=True)
        environment = RunEnvironment(settings.seed, self._device or settings.device, settings.threads)
        environment.apply()
        worker = Worker(algorithm, (spec,), environment, folder, self._state / RELEASES)
        loaded = worker.answer(Task(spec.name))
        if isinstance(loaded, Failure):
            raise TrainingError(f"{self._data} cannot be loaded: {loaded.reason}")
        announcement = Announcement(
            protocol=PROTOCOL,
            software=versions(),
            digest=site.digest,
            splits_digest=site.splits_digest,
            files=dict(split.counts.files),
            patients=dict(split.counts.patients),
            scored=loaded.scored,
            images=loaded.images,
            certificate=self._kit.certificate.read_text(),
            nonce="-",
            signature="-",
            **_announced(policy),
            **ours,
        )
        log = _SentLog(folder / SENT_FILE)
        warnings = tuple(data_warnings((split,)))
        return _Prepared(invitation, algorithm, worker, data, spec, announcement, folder, log, warnings)

    def _check(self, invitation: Invitation, policy: Policy) -> None:
        problems = differences(versions(), invitation.software, "the operator")
        if invitation.protocol != PROTOCOL:
            problems.append(f"protocol: expected {PROTOCOL}, found {invitation.protocol} at the operator")
        if policy.methods is not None and invitation.method not in policy.methods:
            planned = (
                ": --plan runs it before the training, to ask for counts alone; add it to the list, or ask "
                "the operator to give --task in place of --plan"
                if invitation.method == PLAN
                else "; add it to the list, or agree on another method with the operator"
            )
            problems.append(
                f"methods: the policy allows {', '.join(policy.methods)}, not {invitation.method}{planned}"
            )
        if problem := problem_of(self._device or invitation.settings.get("device", "cpu")):
            problems.append(f"{problem} at this hospital; start it with --device cpu, or another that it has")
        if problems:
            raise ConfigurationError("this hospital cannot take part in the operator's run", problems)

    def _read(self, task: ModelTask, rule: str | None) -> _Folder:
        """Read and check the folder, once for a task and the policy's rule for patients."""
        read = self._folder
        if read is None or (read.task, read.rule) != (task, rule):
            ruled = task if rule is None else task.model_copy(update={"patient": rule})
            site = load_site(self._data, ruled, self._kit.name)
            rows = read_rows(self._data / CASES, site.name, [])
            named = {name for name, row in rows.items() if row.patient is not None}
            self._folder = read = _Folder(task, rule, site, named >= {case.name for case in site.cases})
        return read

    def _work(self, session: str) -> Next:
        """Run tasks until the run ends; returns the operator's message on its end."""
        assert self._prepared is not None
        while True:
            self._awake.clear()
            found, _ = unpack(Next, self._ask("next", Session(session=session)))
            if found.over is not None:
                return found
            if found.task is None:
                self._awake.wait(_IDLE_S)
                continue
            try:
                self._step(session, self._prepared, found.task)
            except Rejected as error:
                if error.code == "too large":
                    self._watcher.dropped(str(error))
                elif error.code != "stale":
                    raise

    def _step(self, session: str, prepared: _Prepared, said: TaskMessage) -> None:
        plan = prepared.algorithm.plan()
        phase = plan[said.step] if said.step < len(plan) else None
        if not isinstance(phase, Phase) or said.round >= phase.rounds:
            raise TrainingError(
                f"the operator asked for step {said.step}, round {said.round}, of another plan"
            )
        self._watcher.started(phase, said.round)
        try:
            spec = self._obeyed(prepared, phase)
            received = self._download(session, prepared, phase, said)
            answer = prepared.worker.answer(
                Task(
                    spec.name,
                    said.step,
                    said.round,
                    received,
                    said.slot,
                    to=said.to,
                    upload=prepared.folder / "files/up",
                )
            )
            if isinstance(answer, Delivery):
                self._check_size(answer)
        except SiteFailed as error:
            answer = Failure(self._kit.name, str(error))
        if isinstance(answer, Failure):
            self._watcher.refused(phase, said.round, answer.reason)
            self._ask("done", Report(session=session, task=said.id, failure=answer.reason[:2000]))
            return
        # Before the first byte leaves: the round may end, or this process, while it does.
        prepared.log.add(phase, said.round, answer)
        for group, path in answer.files.items():
            self._upload(session, said.id, group, path)
        self._watcher.sent(
            Sent(
                phase.name,
                said.round,
                answer.sent,
                tuple(answer.metrics),
                answer.withheld,
                prepared.log.total,
                answer.seconds,
                answer.privacy,
            )
        )
        self._ask(
            "done",
            Report(
                session=session,
                task=said.id,
                groups=tuple(answer.files),
                weight=answer.weight,
                metrics=dict(answer.metrics),
                withheld=answer.withheld,
                slot=answer.slot,
                seconds=answer.seconds,
                privacy={name: SpentMessage(**asdict(cost)) for name, cost in answer.privacy.items()},
            ),
        )

    def _obeyed(self, prepared: _Prepared, phase: Phase) -> SiteSpec:
        """Read the policy again and hand it to the worker. Raises SiteFailed when it forbids the step."""
        try:
            policy = Policy.read(self._policy_file)
        except ConfigurationError as error:
            raise SiteFailed("the hospital's policy cannot be read; nothing leaves until it can") from error
        self._policy = policy
        if not policy.takes_part:
            raise SiteFailed("the hospital's policy pauses its part")
        if policy.methods is not None and prepared.invitation.method not in policy.methods:
            raise SiteFailed("the hospital's policy no longer allows this method")
        if problem := prepared.data.problem(policy):
            raise SiteFailed(problem)
        spec = replace(prepared.spec, **_of_policy(policy))
        if not may_take_part(phase, spec):
            raise SiteFailed(f"the hospital's policy does not allow phase '{phase.name}'")
        prepared.worker.replace_site(spec)
        return spec

    def _check_size(self, answer: Delivery) -> None:
        most = self._policy.megabytes_per_round * 2**20
        if sum(answer.sent.values()) > most:
            raise SiteFailed(
                f"the upload has {sum(answer.sent.values())} bytes, the hospital's policy allows {most:.0f}"
            )

    def _download(
        self, session: str, prepared: _Prepared, phase: Phase, said: TaskMessage
    ) -> dict[str, Path]:
        """Fetch the groups of a step as files, and check their headers before a tensor is read."""
        declared = {group.name for group in phase.downloads}
        if {*said.downloads} != declared:
            raise SiteFailed(f"expected the downloads {sorted(declared)}, found {sorted(said.downloads)}")
        found, most = sum(said.downloads.values()) / 2**20, self._policy.megabytes_received
        if found > most:
            raise SiteFailed(
                f"the downloads of a step: expected at most {most:g} MiB (`megabytes_received` of the "
                f"hospital's policy), found {found:.1f}"
            )
        # A round that the operator took back comes again, with other weights in the same file.
        prepared.worker.forget_downloads()
        paths: dict[str, Path] = {}
        for group, size in said.downloads.items():
            paths[group] = prepared.folder / "files" / f"down-{group}"
            paths[group].parent.mkdir(parents=True, exist_ok=True)
            with naming(paths[group]), paths[group].open("wb") as file:
                while (at := file.tell()) < size:
                    part = Slice(session=session, task=said.id, group=group, offset=at)
                    chunk = self._ask("read", part)
                    if not chunk or at + len(chunk) > size:
                        raise SiteFailed(f"group '{group}': expected {size} bytes, found {at + len(chunk)}")
                    file.write(chunk)
            try:
                check_tensors(paths[group])
            except TrainingError as error:
                raise SiteFailed(f"the download of group '{group}': {error}") from error
        return paths

    def _upload(self, session: str, task: str, group: str, path: Path) -> None:
        """Send a file in chunks. After a lost reply a chunk is sent again, and counts once."""
        size = path.stat().st_size
        with path.open("rb") as file:
            at = 0
            while at < size:
                file.seek(at)
                part = Slice(session=session, task=task, group=group, offset=at, total=size)
                written, _ = unpack(Written, self._ask("write", part, file.read(CHUNK)))
                at = written.at

    def _ask(self, topic: str, message: Message, body: bytes = b"") -> bytes:
        return self._request(topic, pack(message, body))

    def _request(self, topic: str, content: bytes) -> bytes:
        """Repeat a request until the operator answers, so that a lost reply does not cost a computed step.

        The operator may have served it before: it writes a chunk once and counts a report once. On a slow
        line requests wait longer, since a chunk that is sent again follows the first one over the same line.
        A first failure at once is no news: the first request often comes before the connection.
        """
        failed = 0
        while True:
            began = time.monotonic()
            try:
                reply = self._cell.request(topic, content, self._patience_s)
            except Unreachable as error:
                timed_out = time.monotonic() - began >= self._patience_s
                if timed_out:
                    self._patience_s = min(2 * self._patience_s, _LONGEST_S)
                failed += 1
                if timed_out or failed > 1:
                    self._watcher.waiting(str(error))
                time.sleep(_RETRY_S)
                continue
            self._patience_s = min(max(_TIMEOUT_S, 2 * (time.monotonic() - began)), _LONGEST_S)
            return reply


def _of_policy(policy: Policy) -> dict[str, Any]:
    return {
        "allows": frozenset(policy.allows),
        "consents": policy.consents,
        "bounds": policy.bounds,
        "demand": policy.privacy,
    }


def _announced(policy: Policy) -> dict[str, Any]:
    return {
        "allows": tuple(sorted(policy.allows)),
        "consents": policy.consents,
        "bounds": policy.bounds,
        "privacy": policy.privacy,
    }


def _task(invitation: Invitation) -> ModelTask:
    try:
        return ModelTask.model_validate(invitation.task)
    except ValidationError as error:
        raise ConfigurationError("the operator's task is not valid", [str(error)]) from error


def _settings(invitation: Invitation) -> RunConfig:
    return parse(RunConfig, invitation.settings, "the operator's settings")
