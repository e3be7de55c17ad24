"""The federation practises: members take turns as the hospital from outside, and what that teaches is kept.

    each member: how large its targets are, and in how many pieces
    for each member k:
        federate the others                       a run of its own, which k has no part in
        at k: adapt to its scans without labels by the dose that their shift asks for, score the change with
              them, send home aggregates
    put all members' episodes into the playbook

A rotation is an ordinary run with `leave_out`, so it resumes, and does not depend on the number of workers. A
rotation that cannot be finished costs its own episodes only. Scans of the test split take no part.

Shared:  what the method shares, once more per rotation; per episode three numbers, as statistics.
Stays:   images, masks, and the Dice of every patient.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from model_store.lens import FINGERPRINT, Fingerprint, fit
from model_store.task import Task
from personalization.dose import (
    FILE,
    Change,
    Episode,
    Playbook,
    Practice,
    passes,
    practise,
    targets_of,
    typical_targets,
)
from personalization.gate import Targets, ThroughLens
from personalization.iop_fl.space import GLOBAL, RoutingSpace
from personalization.iop_fl.spread import FEWEST, Spread
from personalization.iop_fl.spread import FILE as SPREAD
from training.algorithm import (
    Algorithm,
    ClientResult,
    Group,
    Memory,
    ModelDraft,
    Phase,
    Publication,
    RoundResult,
    State,
    StepContext,
)
from training.data.cases import RemoteSite, Site
from training.engine.client import RunEnvironment
from training.engine.defence import least_uploads
from training.engine.egress import may_take_part
from training.engine.engine import FederationEngine
from training.engine.folder import RunFolder
from training.engine.history import RoundEntry
from training.errors import ConfigurationError, FederationError, TrainingError
from training.local.data import Data, ScanSize
from training.local.registry import kind_of
from training.local.scores import dice_per_patient, recall_by_class
from training.local.site import AnyData, SiteData
from training.parts.spread import SPREAD as APART
from training.progress import Afterwards, Progress
from training.run import Run, execute
from training.state_tree import join, part

SPACE = Group("space", "weights", "collect")
SPREADS = Group("spreads", "statistics", "collect")
TARGETS = Group("targets", "statistics", "collect")
EPISODES = Group("episodes", "statistics", "collect")

PRACTICE = "practice"  # what follows the runs, as progress calls it
_FEWEST = 2  # members that practise
_NO_PLAYBOOK = "the federation's practice came to no playbook"

DEFAULT = Practice()
METHODS = ("fedavg", "iop-fl")


@dataclass(frozen=True)
class Made:
    """A playbook, the episodes that it rests on by member, what it cost, and what went wrong.

    `rounds` are those of the rotations, `sent` the bytes that left the members by group: in all rotations
    together (`rotations`), and to practise.
    """

    playbook: Playbook
    episodes: Mapping[str, tuple[Episode, ...]]
    rounds: int
    sent: Mapping[str, int]
    warnings: tuple[str, ...]


def make_playbook(
    run: Run,
    place: Callable[[Run], Path],
    practice: Practice,
    *,
    workers: int | None = None,
    quorum: int | None = None,
    progress: Progress | None = None,
) -> Made:
    """Rotate and practise. `place` gives the folder of a rotation's run; one that is there goes on.

    Raises ConfigurationError where fewer than two members can practise, and FederationError where fewer did.
    """
    members = check_practises(run)
    then = afterwards(run, members, practice)
    spaces: dict[str, tuple[ModelDraft, ...]] = {}
    spreads: dict[str, bytes] = {}
    fingerprints: dict[str, bytes] = {}
    warnings: list[str] = []
    rounds, sent = 0, Counter[str]()
    for number, member in enumerate(members, 1):
        rotation = rotation_of(run, member)
        try:
            if progress is not None:
                sites = [spec.name for spec in rotation.specs()]
                progress.run_started(
                    f"practice without {member}",
                    rotation.algorithm().plan(),
                    sites,
                    place=(1 + number, 1 + len(members)),
                    then=then,
                )
            least = None if quorum is None else min(quorum, len(rotation.specs()))
            result = execute(
                rotation, place(rotation), workers=workers, resume=True, observer=progress, quorum=least
            )
        except TrainingError as error:
            warnings.append(f"no playbook without {member}: {error}")
            continue
        if SPREAD not in result.publication.files:
            warnings.append(f"no playbook without {member}: the others do not know how far they are apart")
            continue
        spaces[member] = result.publication.models
        spreads[member] = result.publication.files[SPREAD]
        if FINGERPRINT in result.publication.files:
            fingerprints[member] = result.publication.files[FINGERPRINT]
        rounds += len(result.history)
        sent["rotations"] += sum(_sent(result.history).values())
    if len(spaces) < _FEWEST:
        raise FederationError(_NO_PLAYBOOK, warnings)
    # A lens is practised by all, so that the record is of one thing.
    lensed = fingerprints.keys() == spaces.keys()
    algorithm = Rotations(run.federation.task, spaces, spreads, practice, fingerprints if lensed else {})
    specs = [spec for spec in run.specs() if spec.name in spaces]
    # With other members all measure again, since every practice depends on what the others measured.
    folder = RunFolder(place(run) / "practice" / _digest([spec.name for spec in specs]))
    settings = run.settings
    if progress is not None:
        progress.run_started(PRACTICE, algorithm.plan(), [spec.name for spec in specs])
    with folder.held():
        folder.claim({**run.identity(), "practice": asdict(practice)}, resume=True)
        outcome = FederationEngine(
            algorithm,
            specs,
            RunEnvironment(settings.seed, settings.device, settings.threads),
            folder,
            workers=1 if workers is None else workers,
            observer=progress,
        ).run()
    episodes = episodes_of(outcome.server)
    try:
        playbook = Playbook.of(episodes, _typical(outcome.server.facts.get("targets", {})), lensed=lensed)
    except ValueError as error:
        raise FederationError(_NO_PLAYBOOK, [str(error)]) from error
    sent.update(_sent(outcome.history))
    return Made(playbook, episodes, rounds, dict(sent), (*warnings, *_dropped(outcome.history)))


def afterwards(run: Run, members: Sequence[str], practice: Practice) -> dict[str, Afterwards]:
    """What follows the rotations, by the passes of the network: `estimate` takes one of every image."""
    busiest = max(
        (site for site in run.sites() if site.name in members), key=lambda site: site.counts.files["train"]
    )
    task, files = run.federation.task, busiest.counts.files
    kind, size = kind_of(task), _size_of_scan(task, busiest)
    scans, most = files["train"] + files["val"], kind.most_met
    # Methods publish what the members' scans look like, so that a lens is practised.
    every = passes(practice, size.images * scans, size.passes * scans, lensed=True)
    estimated = size.images * files["train"]
    return {PRACTICE: Afterwards("practise", "estimate", every / max(min(estimated, most or estimated), 1))}


def _size_of_scan(task: Task, site: Site[Any] | RemoteSite) -> ScanSize:
    """That of a site's first training scan; of a site elsewhere, a picture's."""
    if not isinstance(site, Site):
        return ScanSize(1, 1)
    return kind_of(task).size_of(site.of_split("train")[0], task)


def with_playbook(publication: Publication, made: Made) -> Publication:
    """The publication with the playbook as a file of its artefact, and what it cost."""
    record = made.playbook.by_shift
    assert record is not None  # it was made now
    facts = {
        "members": list(made.playbook.members),
        "rounds": made.rounds,
        "sent": dict(made.sent),
        "by_shift": record.model_dump(mode="json"),
    }
    return replace(
        publication,
        files={**publication.files, FILE: made.playbook.to_bytes()},
        details={**publication.details, "playbook": facts},
    )


def check_practises(run: Run) -> tuple[str, ...]:
    """Return the members that can practise.

    Raises ConfigurationError for a run that publishes nothing that a playbook is for, one with differential
    privacy, or one with too few members, for a practice or for the defence. Each rotation has releases, keys
    and an epsilon of its own, which are not part of the run's account.
    """
    if run.method not in METHODS:
        raise ConfigurationError(
            "the federation cannot practise",
            [f"expected --method {' or '.join(METHODS)}, which publish a global model, found {run.method}"],
        )
    if run.federation.task.regions:
        raise ConfigurationError(
            "the federation cannot practise",
            [
                "expected classes that exclude each other, which the dose compares, found regions: "
                "leave out --playbook"
            ],
        )
    specs = run.specs()
    private = [spec.name for spec in specs if spec.privacy or spec.demand]
    if private:
        raise ConfigurationError(
            "the federation cannot practise",
            [
                "expected no privacy and no privacy_demands, found updates with noise from "
                f"{', '.join(private)}: each member trains in more runs, which neither its epsilon nor the "
                "report would count; leave out --playbook, or train without differential privacy"
            ],
        )
    phases = Rotations(run.federation.task, {}, {}, DEFAULT).plan()
    members = tuple(spec.name for spec in specs if all(may_take_part(phase, spec) for phase in phases))
    if len(members) < _FEWEST:
        raise ConfigurationError(
            "the federation cannot practise",
            [
                f"expected at least {_FEWEST} members that consent and let statistics out, found "
                f"{', '.join(members) or 'none'}; use --consent or wider policies, or leave out --playbook"
            ],
        )
    _check_spread(run, members)
    how, others = run.settings.defence, len(specs) - 1
    least = least_uploads(how.reduction, how.trim, how.liars)
    if others < least:
        raise ConfigurationError(
            "the federation cannot practise",
            [
                f"defence.reduction: {how.reduction} needs {least} sites, found {others} without the member "
                "that practises; use another reduction, or leave out --playbook"
            ],
        )
    return members


def _check_spread(run: Run, members: Sequence[str]) -> None:
    """Raise ConfigurationError unless the others of every member measure how far they are apart."""
    plan = [phase for phase in run.algorithm().plan() if isinstance(phase, Phase)]
    measures = [phase for phase in plan if APART in phase.uploads]
    if not measures:
        raise ConfigurationError(
            "the federation cannot practise",
            [
                "expected batch norm with statistics: estimated, which the dose by shift moves and by which "
                "members measure how far they are apart, found none: leave out --playbook"
            ],
        )
    able = {spec.name for spec in run.specs() for phase in measures if spec.refusal(phase, APART) is None}
    if any(len(able - {member}) < FEWEST for member in members):
        raise ConfigurationError(
            "the federation cannot practise",
            [
                f"expected {FEWEST} members that let statistics out beside each that practises, since the "
                f"dose depends on how far these are apart, found {', '.join(sorted(able)) or 'none'}; use "
                "wider policies, or leave out --playbook"
            ],
        )


def rotation_of(run: Run, member: str) -> Run:
    """The run of all members but one. The order in which sites are left out changes nothing."""
    left = tuple(sorted({*run.settings.leave_out, member}))
    settings = run.settings.model_copy(update={"leave_out": left})
    return replace(run, settings=settings, scores_tests=False)


class Rotations(Algorithm):
    """Each member practises with the models that were trained without it."""

    def __init__(
        self,
        task: Task,
        spaces: Mapping[str, tuple[ModelDraft, ...]],
        spreads: Mapping[str, bytes],
        practice: Practice,
        fingerprints: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """`spaces`, `spreads` and `fingerprints` are those of the rotation without each member.

        Without fingerprints no lens is practised.
        """
        self._task = task
        self._spaces = spaces
        self._known = {
            member: {SPREAD: content, **({FINGERPRINT: fingerprints[member]} if fingerprints else {})}
            for member, content in spreads.items()
        }
        self._practice = practice

    @override
    def plan(self) -> tuple[Phase, ...]:
        """Measure the targets of a segmentation, then practise."""
        measure = Phase(
            "measure", 1, (), (TARGETS,), self.measure, self.keep_targets, consent=True, everyone=True
        )
        practise = Phase(
            "practise",
            1,
            (SPACE, SPREADS),
            (EPISODES,),
            self.practise,
            self.keep_episodes,
            self.send_space,
            consent=True,
            everyone=True,
        )
        return (measure, practise) if kind_of(self._task).dense else (practise,)

    @override
    def initial(self, context: StepContext) -> Memory:
        return Memory()

    def send_space(self, server: Memory, site: str) -> Mapping[str, State]:
        """The models of the rotation without the site, how far its members are apart, and what their scans
        look like."""
        return {
            SPACE.name: join({draft.site or GLOBAL: draft.weights for draft in self._spaces[site]}),
            SPREADS.name: {
                name: torch.tensor([*content], dtype=torch.uint8)
                for name, content in self._known[site].items()
            },
        }

    def measure(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """Measure the targets of the site's scans of training and validation."""
        examples = _scans(data, self._task).met()
        own = targets_of(torch.from_numpy(examples.targets), examples.patients, len(self._task.classes))
        return ClientResult({TARGETS.name: _packed(own)}, weight=1.0)

    def practise(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """Practise on the site's scans of training and validation."""
        assert context.site is not None
        drafts = self._spaces[context.site]
        states = {draft.site or GLOBAL: part(received[SPACE.name], draft.site or GLOBAL) for draft in drafts}
        global_model = states.pop(GLOBAL)
        network = drafts[0].network
        space = RoutingSpace.of(network.name, network.arguments, states, global_model)
        known = {name: bytes(content.tolist()) for name, content in received[SPREADS.name].items()}
        fingerprint = known.get(FINGERPRINT)
        episodes = practise(
            space,
            Spread.model_validate_json(known[SPREAD]),
            _scans(data, self._task),
            self._score,
            self._practice,
            int(torch.randint(2**31, (1,), generator=context.generator("practise"))),
            context.device,
            fit_lens=(
                None
                if fingerprint is None
                else partial(_lens_of, Fingerprint.model_validate_json(fingerprint))
            ),
        )
        content = json.dumps([asdict(episode) for episode in episodes]).encode()
        packed = {"json": torch.tensor(list(content), dtype=torch.uint8)}
        return ClientResult({EPISODES.name: packed}, weight=1.0)

    def _score(self, network: nn.Module, scans: Data) -> Mapping[str, float]:
        if scans.dense:
            return dice_per_patient(network, scans, len(self._task.classes))
        return recall_by_class(network, scans)

    def keep_targets(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Keep what every member's targets look like."""
        found = {site: asdict(_unpacked(own)) for site, own in result.collected[TARGETS.name].items()}
        return Memory(server.tensors, {"targets": found})

    def keep_episodes(self, context: StepContext, server: Memory, result: RoundResult) -> Memory:
        """Keep every member's episodes."""
        found = {
            site: json.loads(bytes(state["json"].tolist()))
            for site, state in result.collected[EPISODES.name].items()
        }
        return Memory(server.tensors, {**server.facts, "episodes": found})

    @override
    def publication(self, server: Memory) -> Publication:
        """Nothing: the playbook goes into another run's artefact."""
        return Publication("none", (), server.facts)


def _lens_of(fingerprint: Fingerprint, scans: Data) -> tuple[Change | None, ThroughLens]:
    """The lens of some scans, as a job fits it."""
    made = fit(scans.viewed, fingerprint)
    if made is None:
        return None, ThroughLens(1.0)
    through = ThroughLens(made.left, None, made.grid, made.sides, made.lens.negated)
    return made.lens.apply if made.lens.steps else None, through


def _scans(data: SiteData[AnyData], task: Task) -> AnyData:
    """The examples of training and validation."""
    sets = [data.all_train, data.val] if data.held_out else [data.all_train]
    return type(sets[0]).joined(sets, task)


def _typical(targets: Mapping[str, Mapping[str, float]]) -> Targets:
    """Those of all members; unknown where none measured them, of a classification."""
    return typical_targets([Targets(**own) for own in targets.values()]) if targets else Targets()


def _packed(targets: Targets) -> State:
    values = (targets.share, targets.largest, targets.pieces)
    return {"targets": torch.tensor(values, dtype=torch.float64)}


def _unpacked(state: State) -> Targets:
    return Targets(*state["targets"].tolist())


def episodes_of(server: Memory) -> dict[str, tuple[Episode, ...]]:
    """The members' episodes, of what `Rotations` left with the server."""
    return {site: tuple(Episode(**row) for row in rows) for site, rows in server.facts["episodes"].items()}


def _digest(members: list[str]) -> str:
    return hashlib.sha256(json.dumps(members).encode()).hexdigest()[:16]


def _sent(history: tuple[RoundEntry, ...]) -> Counter[str]:
    """Bytes that left the sites, by group."""
    found: Counter[str] = Counter()
    for entry in history:
        for site in entry.deliveries.values():
            found.update(site.sent)
    return found


def _dropped(history: tuple[RoundEntry, ...]) -> tuple[str, ...]:
    return tuple(
        f"{site} did not practise: {reason}" for entry in history for site, reason in entry.dropped.items()
    )
