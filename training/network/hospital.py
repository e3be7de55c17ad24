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

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from training.algorithm import Phase, Plan
from training.data.cases import Site
from training.engine.device import fault_of
from training.engine.egress import SiteSpec, may_take_part
from training.engine.folder import locked
from training.engine.worker import Delivery, Failure, Task
from training.errors import ConfigurationError, SiteFailed, TrainingError
from training.network.about import tell
from training.network.calendar import remember
from training.network.cell import Rejected
from training.network.checking import Hospital as Checked
from training.network.deadline import ended_after
from training.network.kits import Kit
from training.network.link import RETRY_S, Link
from training.network.messages import (
    PROTOCOL,
    Asking,
    Invitation,
    Next,
    Planned,
    PlannedRun,
    Report,
    Session,
    SpentMessage,
    TaskMessage,
    Welcome,
    unpack,
)
from training.network.policy import Policy
from training.network.preparation import Preparation, Prepared
from training.privacy import Spent

_IDLE_S = 30.0  # between questions where no run is planned
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

    def planned(self, run: PlannedRun) -> None:
        """Handle a run of the operator's calendar to which no person here has agreed."""

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
        self._policy_file = policy
        self._policy = Policy.read(policy)
        self._of_roster = Checked(kit.folder, data, policy, state, device)
        self._state = state
        self._watcher = watcher
        self._preparation = Preparation(kit, data, state, store, device)
        self._link = Link(kit, watcher.waiting)
        self._prepared: Prepared | None = None
        self._session: str | None = None
        self._joined: str | None = None
        self._finished: str | None = None  # a run that another one follows

    def run(self, *, stay: bool = False) -> str:
        """Take part until the operator's run ends; returns the operator's words on its end.

        With `stay` it waits for the next run, and the next one; meanwhile the operator's roster has it.

        Raises TrainingError when the hospital cannot or must not take part: its folder, its policy, a version
        or a digest that differs, a certificate that the operator rejects, another run than the first, or
        another process that uses the same state folder. After a KeyboardInterrupt the hospital leaves the
        run.
        """
        # Another process would write the same memory and uploads, and count its own releases only.
        with locked(self._state, f"{self._state} is in use: another process of this hospital runs here"):
            self._link.start()
            try:
                while True:
                    end = self._take_part()
                    if not stay:
                        return end
                    self._watcher.waiting(f"{end}; waiting for the next run")
                    self._finished, self._joined, self._session = self._joined, None, None
                    self._prepared = None
            except KeyboardInterrupt:
                if self._session is not None:
                    self._link.leave(self._session, "stopped by the hospital")  # while it is connected
                raise
            finally:
                self._link.stop()

    def _take_part(self) -> str:
        while True:
            try:
                self._session = self._session or self._join()
                end = self._work(self._session)
            except Rejected as error:
                if error.code in _ENDS:
                    raise TrainingError(f"the operator rejected this hospital: {error}") from error
                self._session = None
                if error.code == "idle":
                    self._watcher.waiting(str(error))
                    time.sleep(_IDLE_S)
                continue
            if not end.follows:
                return end.over or ""
            self._watcher.waiting(f"{end.over}; another run follows")
            self._finished, self._joined, self._session = self._joined, None, None
            self._prepared = None

    def _hello(self, site: Site[Any] | None = None) -> None:
        """Say for the roster what the policy permits. An operator of an earlier version has none."""
        with suppress(Rejected, ConfigurationError):
            self._policy = Policy.read(self._policy_file)
            said = tell(self._of_roster, self._policy, site)
            planned, _ = unpack(Planned, self._link.ask("hello", said))
            remember(self._state, planned.runs)
            for run in planned.runs:
                if run.id not in said.agreed:
                    self._watcher.planned(run)

    def _join(self) -> str:
        if self._prepared is None:
            self._hello()
        while (invitation := self._invitation()).run == self._finished:
            time.sleep(RETRY_S)  # the operator has not ended it yet
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
        policy = self._policy
        prepared = before if same and before is not None else self._preparation.prepare(invitation, policy)
        prepared = replace(prepared, spec=policy.applied(prepared.spec))
        self._prepared = prepared
        nonce = invitation.nonce
        said = {"nonce": nonce, "signature": _signed(self._kit, nonce), **policy.announced()}
        signed = prepared.announcement.model_copy(update=said)
        if not same:
            self._hello(prepared.data.site)
        welcome, _ = unpack(Welcome, self._link.ask("join", signed))
        self._joined = invitation.run
        if not same or before is None or prepared.spec != before.spec:
            self._watcher.joined(invitation, prepared.algorithm.plan(), prepared.spec, prepared.data.patients)
            for warning in prepared.warnings:
                self._watcher.warning(warning)
        return welcome.session

    def _invitation(self) -> Invitation:
        return unpack(Invitation, self._link.ask("invite", Asking(protocol=PROTOCOL)))[0]

    def _work(self, session: str) -> Next:
        """Run tasks until the run ends; returns the operator's message on its end."""
        assert self._prepared is not None
        while True:
            self._link.listen()
            found, _ = unpack(Next, self._link.ask("next", Session(session=session)))
            if found.over is not None:
                return found
            if found.task is None:
                self._link.idle()
                continue
            try:
                self._step(session, self._prepared, found.task)
            except Rejected as error:
                if error.code not in ("too large", "stale"):
                    raise
                self._watcher.dropped(str(error))

    def _step(self, session: str, prepared: Prepared, said: TaskMessage) -> None:
        plan = prepared.algorithm.plan()
        phase = plan[said.step] if said.step < len(plan) else None
        if not isinstance(phase, Phase) or said.round >= phase.rounds:
            raise TrainingError(
                f"the operator asked for step {said.step}, round {said.round}, of another plan"
            )
        if problem := fault_of(prepared.device):
            raise TrainingError(
                f"{problem}; it did when this hospital joined. Start this process again, and it "
                "repeats its step"
            )
        self._watcher.started(phase, said.round)
        try:
            spec = self._obeyed(prepared, phase)
            received = self._download(session, prepared, phase, said)
            task = Task(
                spec.name,
                said.step,
                said.round,
                received,
                said.slot,
                to=said.to,
                upload=prepared.folder / "files/up",
            )
            policy = self._policy
            with (
                self._link.telling(session, said.id),
                policy.bounding_networks(),
                ended_after(policy.most_minutes_per_round),
            ):
                answer = prepared.worker.answer(task)
            if isinstance(answer, Delivery):
                self._check_size(answer)
        except SiteFailed as error:
            answer = Failure(self._kit.name, str(error))
        if isinstance(answer, Failure):
            self._watcher.refused(phase, said.round, answer.reason)
            self._link.ask("done", Report(session=session, task=said.id, failure=answer.reason[:2000]))
            return
        # Before the first byte leaves: the round may end, or this process, while it does.
        prepared.log.add(phase, said.round, answer)
        for group, path in answer.files.items():
            self._link.upload(session, said.id, group, path)
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
        self._link.ask(
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

    def _obeyed(self, prepared: Prepared, phase: Phase) -> SiteSpec:
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
        if prepared.log.rounds >= policy.most_rounds:
            raise SiteFailed(
                f"the run had {prepared.log.rounds} rounds here (`most_rounds` of the hospital's policy)"
            )
        spec = policy.applied(prepared.spec)
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

    def _download(self, session: str, prepared: Prepared, phase: Phase, said: TaskMessage) -> dict[str, Path]:
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
        return self._link.download(session, said, prepared.folder / "files")


def _signed(kit: Kit, nonce: str) -> str:
    from nvflare.lighter.utils import load_private_key_file, sign_content

    signature: str = sign_content(nonce, load_private_key_file(str(kit.key)))
    return signature
