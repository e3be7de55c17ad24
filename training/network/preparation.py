"""What a hospital checks before it joins: the operator's invitation, and its own folder."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from model_store.task import Task as ModelTask
from personalization.errors import NetworkError
from training.algorithm import Algorithm, Phase
from training.config import RunConfig, parse
from training.data.cases import Federation, Site, data_warnings
from training.data.federation import load_site
from training.data.segmentation.layout import CASES, read_rows
from training.engine.client import RunEnvironment
from training.engine.device import problem_of
from training.engine.egress import SiteSpec
from training.engine.folder import RELEASES
from training.engine.worker import Delivery, Failure, Task, Worker
from training.errors import ConfigurationError, TrainingError
from training.methods.registry import method as find_method
from training.network.kits import Kit
from training.network.messages import (
    PROTOCOL,
    Announcement,
    Invitation,
    configuration_digest,
    differences,
    other_wire,
    plan_digest,
    versions,
)
from training.network.policy import Policy
from training.planning_round import METHOD as PLAN
from training.run import Run

SENT_FILE = "sent.jsonl"
_REFUSED = "this hospital cannot take part in the operator's run"


@dataclass(frozen=True)
class SiteFolder:
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
class Prepared:
    """A run that this hospital can take part in."""

    invitation: Invitation
    algorithm: Algorithm
    worker: Worker
    data: SiteFolder
    spec: SiteSpec
    announcement: Announcement
    folder: Path
    log: SentLog
    warnings: tuple[str, ...]
    device: str


class SentLog:
    """The hospital's log of what left in a run: `total` bytes after `rounds` steps."""

    def __init__(self, path: Path) -> None:
        self._path = path
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            os.truncate(path, len(whole))  # the line that a killed process had begun; nothing of it left
        lines = whole.splitlines()
        self.rounds = len(lines)
        self.total = sum(sum(json.loads(line)["sent"].values()) for line in lines)

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
        self.rounds += 1


class Preparation:
    """Prepares runs at a hospital. The arguments are those of `training.network.hospital.Hospital`."""

    def __init__(self, kit: Kit, data: Path, state: Path, store: Path | None, device: str | None) -> None:
        self._kit = kit
        self._data = data
        self._state = state
        self._store = store
        self._device = device
        self._folder: SiteFolder | None = None

    def prepare(self, invitation: Invitation, policy: Policy) -> Prepared:
        """Check what the operator would run, then this hospital's folder. Raises TrainingError."""
        self._check(invitation, policy)
        task, settings = _task(invitation), _settings(invitation)
        chosen = find_method(invitation.method)
        config = parse(chosen.config, invitation.config, f"the operator's configuration of {chosen.name}")
        _check_rounds(config.rounds, policy)
        config = config.at_hospital(self._store)
        data = self._read(task, policy.patient)
        if problem := data.problem(policy):
            raise ConfigurationError(_REFUSED, [problem])
        site = data.site
        run = Run(Federation(self._data, task, (site,), False, ""), chosen.name, config, settings)
        algorithm = _built(run, policy)
        (split,), (spec,) = run.sites(), run.specs()
        spec = policy.applied(spec)
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
        with policy.bounding_networks():
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
            **policy.announced(),
            **ours,
        )
        log = SentLog(folder / SENT_FILE)
        unlike = differences(versions(), invitation.software, "the operator")
        warnings = (*unlike, *data_warnings((split,)))
        device = self._device or settings.device
        return Prepared(
            invitation, algorithm, worker, data, spec, announcement, folder, log, warnings, device
        )

    def _check(self, invitation: Invitation, policy: Policy) -> None:
        problems = []
        if problem := other_wire(PROTOCOL, "this hospital", invitation.protocol, "the operator"):
            problems.append(problem)
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
            raise ConfigurationError(_REFUSED, problems)

    def _read(self, task: ModelTask, rule: str | None) -> SiteFolder:
        """Read and check the folder, once for a task and the policy's rule for patients."""
        read = self._folder
        if read is None or (read.task, read.rule) != (task, rule):
            ruled = task if rule is None else task.model_copy(update={"patient": rule})
            site = load_site(self._data, ruled, self._kit.name)
            rows = read_rows(self._data / CASES, site.name, [])
            named = {name for name, row in rows.items() if row.patient is not None}
            self._folder = read = SiteFolder(task, rule, site, named >= {case.name for case in site.cases})
        return read


def _built(run: Run, policy: Policy) -> Algorithm:
    """The operator's method, within the policy. Raises ConfigurationError."""
    try:
        with policy.bounding_networks():
            algorithm = run.algorithm()
    except NetworkError as error:
        raise ConfigurationError(_REFUSED, [str(error)]) from error
    _check_rounds(sum(step.rounds for step in algorithm.plan() if isinstance(step, Phase)), policy)
    return algorithm


def _check_rounds(rounds: int, policy: Policy) -> None:
    if rounds > policy.most_rounds:
        raise ConfigurationError(
            _REFUSED,
            [
                f"expected at most {policy.most_rounds} rounds (`most_rounds` of the hospital's policy), "
                f"found {rounds}"
            ],
        )


def _task(invitation: Invitation) -> ModelTask:
    try:
        # A plan is made for a task that need not say a size yet.
        planned = invitation.method == PLAN
        return ModelTask.for_plan(invitation.task) if planned else ModelTask.model_validate(invitation.task)
    except ValidationError as error:
        raise ConfigurationError("the operator's task is not valid", [str(error)]) from error


def _settings(invitation: Invitation) -> RunConfig:
    return parse(RunConfig, invitation.settings, "the operator's settings")
