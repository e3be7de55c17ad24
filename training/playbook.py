"""The federation practises: members take turns as the hospital from outside, and what that teaches is kept.

    each member: how large its targets are, and in how many pieces
    for each member k:
        federate the others                       a run of its own, which k has no part in
        at k: adapt to its scans without labels, score the change with them, send home aggregates
    fit the playbook of all members' episodes

A rotation is an ordinary run with `leave_out`, so it resumes, and does not depend on the number of workers. A
rotation that cannot be finished costs its own episodes only. Scans of the test split take no part.

Shared:  what the method shares, once more per rotation; per episode about 20 numbers, as statistics.
Stays:   images, masks, and the Dice of every patient.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from model_store.task import Task
from personalization.gate import Targets
from personalization.iop_fl.space import GLOBAL, RoutingSpace
from personalization.iop_fl.spread import FEWEST, Spread
from personalization.iop_fl.spread import FILE as SPREAD
from personalization.networks import outline
from personalization.playbook import (
    FILE,
    Episode,
    Features,
    Playbook,
    Practice,
    Trial,
    fit,
    passes,
    practise,
    targets_of,
    typical_targets,
)
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.recipe import suits
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
from training.local.registry import kind_of
from training.local.site import SiteData
from training.methods.fedavg import FedAvg
from training.progress import Afterwards, Progress
from training.run import Run, execute
from training.state_tree import join, part

SPACE = Group("space", "weights", "collect")
SPREADS = Group("spreads", "statistics", "collect")
TARGETS = Group("targets", "statistics", "collect")
EPISODES = Group("episodes", "statistics", "collect")

PRACTICE = "practice"  # what follows the runs, as progress calls it
_FEWEST = 2  # members; a recipe of each is judged by the others
_NO_PLAYBOOK = "the federation's practice came to no playbook"

LADDER = {
    "quarter": (0.25, 0.25, 0.25),
    "half": (0.5, 0.5, 0.5),
    "full": (1.0, 1.0, 1.0),
    "early": (1.0, 0.5, 0.0),
}
AFTER = {"ladder, half": "ladder, quarter", "ladder, full": "ladder, half"}
# Recipes of forward passes alone: the least spread, and minutes for a member of a hundred slices. A scanner
# of a severity above 0 is drawn, so a severity may come twice.
DEFAULT = Practice(
    tuple(
        Trial(f"ladder, {name}", AdaptationConfig(preset="ladder", doses=doses), AFTER.get(f"ladder, {name}"))
        for name, doses in LADDER.items()
    ),
    severities=(0.0, 1.0, 1.0, 2.0, 2.0, 3.0),
)


# The same of a network with instance norm, which the federation's statistics steady.
OF_INSTANCE_NORM = replace(
    DEFAULT,
    trials=tuple(
        Trial(f"blend, {name}", AdaptationConfig(preset="blend", doses=(dose, dose, dose)), after)
        for name, dose, after in (("tenth", 0.1, None), ("quarter", 0.25, "blend, tenth"))
    ),
)


def practice_of(run: Run) -> Practice:
    """What is practised with the network of a run.

    Raises ConfigurationError where nothing suits its norms.
    """
    algorithm = run.algorithm()
    if not isinstance(algorithm, FedAvg):
        return DEFAULT
    spec = algorithm.network
    network = outline(spec.name, **spec.arguments)
    for practice in (DEFAULT, OF_INSTANCE_NORM):
        if all(suits(trial.config.preset, network) for trial in practice.trials):
            return practice
    raise ConfigurationError(
        "no recipe of adaptation can be practised",
        [
            f"network {spec.name}: expected batch norm, or instance norm that tracks (norm_name or norm: "
            "[instance, {track: true}]), found neither: leave the playbook out"
        ],
    )


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
    progress: Progress | None = None,
) -> Made:
    """Rotate, practise and fit. `place` gives the folder of a rotation's run; one that is there goes on.

    Raises ConfigurationError where fewer than two members can practise, and FederationError where fewer did.
    """
    members = check_practises(run)
    then = afterwards(run, members, practice)
    spaces: dict[str, tuple[ModelDraft, ...]] = {}
    spreads: dict[str, bytes] = {}
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
            result = execute(rotation, place(rotation), workers=workers, resume=True, observer=progress)
        except TrainingError as error:
            warnings.append(f"no playbook without {member}: {error}")
            continue
        spaces[member] = result.publication.models
        if SPREAD in result.publication.files:
            spreads[member] = result.publication.files[SPREAD]
        rounds += len(result.history)
        sent["rotations"] += sum(_sent(result.history).values())
    if len(spaces) < _FEWEST:
        raise FederationError(_NO_PLAYBOOK, warnings)
    algorithm = Rotations(run.federation.task, spaces, practice, spreads)
    specs = [spec for spec in run.specs() if spec.name in spaces]
    # With other members all measure again, since every practice depends on what the others measured.
    folder = RunFolder(place(run) / "practice" / _digest([spec.name for spec in specs]))
    settings = run.settings
    if progress is not None:
        progress.run_started(PRACTICE, algorithm.plan(), [spec.name for spec in specs])
    with folder.held():
        folder.claim({**run.identity(), "practice": _facts(practice)}, resume=True)
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
        options = {trial.name: trial.config.facts() for trial in practice.trials}
        after = {trial.name: trial.after for trial in practice.trials}
        playbook = fit(episodes, options, _typical(outcome.server.facts["targets"]), after)
    except ValueError as error:
        raise FederationError(_NO_PLAYBOOK, [str(error)]) from error
    sent.update(_sent(outcome.history))
    return Made(playbook, episodes, rounds, dict(sent), (*warnings, *_dropped(outcome.history)))


def afterwards(run: Run, members: Sequence[str], practice: Practice | None = None) -> dict[str, Afterwards]:
    """What follows the rotations: as many passes of the network as one of `estimate`, which is one."""
    busiest = max(
        (site for site in run.sites() if site.name in members), key=lambda site: site.counts.files["train"]
    )
    files, each = busiest.counts.files, _slices_per_file(run.federation.task, busiest)
    images = each * (files["train"] + files["val"])
    every = passes(practice or practice_of(run), images, shifted=len(members) > FEWEST)
    return {PRACTICE: Afterwards("practise", "estimate", every / max(each * files["train"], 1))}


def _slices_per_file(task: Task, site: Site[Any] | RemoteSite) -> int:
    """Images that a file gives, as far as its site's first training scan says; 1 of a site elsewhere.

    An adaptation takes a bounded number of images (`Practice.most`), and a volume has many slices.
    """
    if not isinstance(site, Site):
        return 1
    return kind_of(task).images_of(site.of_split("train")[0], task)


def practice_warnings(members: Sequence[str]) -> tuple[str, ...]:
    """What a practice of these members leaves out."""
    if len(members) > FEWEST:
        return ()
    return (
        f"{' and '.join(members)} do not practise the dose by shift, which a service takes by default: it "
        f"needs {FEWEST} members beside the one that practises, {FEWEST + 1} in all. Others are practised",
    )


def with_playbook(publication: Publication, made: Made) -> Publication:
    """The publication with the playbook as a file of its artefact, and what it cost."""
    best = made.playbook.recipes[0]
    facts = {
        "members": list(made.playbook.members),
        "rounds": made.rounds,
        "sent": dict(made.sent),
        "recipes": {record.name: record.bound for record in made.playbook.recipes},
        "best": best.name,
        "changes": {member: list(found) for member, found in best.members.items()},
        "promise": made.playbook.promise,
    }
    by_shift = made.playbook.by_shift
    if by_shift is not None:
        facts["by_shift"] = by_shift.model_dump(mode="json")
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
    if run.method != "iop-fl":
        raise ConfigurationError(
            "the federation cannot practise",
            [f"expected --method iop-fl, which publishes a routing space, found {run.method}"],
        )
    if run.federation.task.regions:
        raise ConfigurationError(
            "the federation cannot practise",
            [
                "expected classes that exclude each other, which every recipe compares, found regions: "
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
    phases = Rotations(run.federation.task, {}, practice_of(run)).plan()
    members = tuple(spec.name for spec in specs if all(may_take_part(phase, spec) for phase in phases))
    if len(members) < _FEWEST:
        raise ConfigurationError(
            "the federation cannot practise",
            [
                f"expected at least {_FEWEST} members that consent and let statistics out, found "
                f"{', '.join(members) or 'none'}; use --consent or wider policies, or leave out --playbook"
            ],
        )
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
        practice: Practice,
        spreads: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """`spaces` and `spreads` are those of the rotation without each member."""
        self._classes = len(task.classes)
        self._spaces = spaces
        self._practice = practice
        self._spreads = {member: list(content) for member, content in spreads.items()}

    @override
    def plan(self) -> tuple[Phase, ...]:
        """Measure targets, then practise."""
        return (
            Phase("measure", 1, (), (TARGETS,), self.measure, self.keep_targets, consent=True, everyone=True),
            Phase(
                "practise",
                1,
                (SPACE, SPREADS, TARGETS),
                (EPISODES,),
                self.practise,
                self.keep_episodes,
                self.send_space,
                consent=True,
                everyone=True,
            ),
        )

    @override
    def initial(self, context: StepContext) -> Memory:
        return Memory()

    def send_space(self, server: Memory, site: str) -> Mapping[str, State]:
        """The models of the rotation without the site, and what the others' targets are like."""
        others = {name: own for name, own in server.facts["targets"].items() if name != site}
        return {
            SPACE.name: join({draft.site or GLOBAL: draft.weights for draft in self._spaces[site]}),
            SPREADS.name: {"json": torch.tensor(self._spreads.get(site, []), dtype=torch.uint8)},
            TARGETS.name: _packed(_typical(others)),
        }

    def measure(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """Measure the targets of the site's scans of training and validation."""
        _, targets, patients = _scans(data)
        own = targets_of(targets, patients, self._classes)
        return ClientResult({TARGETS.name: _packed(own)}, weight=1.0)

    def practise(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """Practise on the site's scans of training and validation."""
        assert context.site is not None
        images, targets, patients = _scans(data)
        drafts = self._spaces[context.site]
        states = {draft.site or GLOBAL: part(received[SPACE.name], draft.site or GLOBAL) for draft in drafts}
        global_model = states.pop(GLOBAL)
        network = drafts[0].network
        space = RoutingSpace.of(network.name, network.arguments, states, global_model)
        episodes = practise(
            space,
            images,
            targets,
            patients,
            self._practice,
            _unpacked(received[TARGETS.name]).share,
            int(torch.randint(2**31, (1,), generator=context.generator("practise"))),
            context.device,
            spread=_spread(received[SPREADS.name]),
        )
        content = json.dumps([asdict(episode) for episode in episodes]).encode()
        packed = {"json": torch.tensor(list(content), dtype=torch.uint8)}
        return ClientResult({EPISODES.name: packed}, weight=1.0)

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


def _scans(data: SiteData) -> tuple[Tensor, Tensor, list[str]]:
    """Images, targets and patients of training and validation; of volumes patches, as a job sees them."""
    sets = [each.met() for each in ([data.all_train, data.val] if data.held_out else [data.all_train])]
    return (
        torch.cat([torch.from_numpy(each.images) for each in sets]),
        torch.cat([torch.from_numpy(each.targets) for each in sets]),
        [patient for each in sets for patient in each.patients],
    )


def _spread(state: State) -> Spread | None:
    content = bytes(state["json"].tolist())
    return Spread.model_validate_json(content) if content else None


def _typical(targets: Mapping[str, Mapping[str, float]]) -> Targets:
    return typical_targets([Targets(**own) for own in targets.values()])


def _packed(targets: Targets) -> State:
    values = (targets.share, targets.largest, targets.pieces)
    return {"targets": torch.tensor(values, dtype=torch.float64)}


def _unpacked(state: State) -> Targets:
    return Targets(*state["targets"].tolist())


def episodes_of(server: Memory) -> dict[str, tuple[Episode, ...]]:
    """The members' episodes, of what `Rotations` left with the server."""
    return {
        site: tuple(Episode(**{**row, "features": Features(**row["features"])}) for row in rows)
        for site, rows in server.facts["episodes"].items()
    }


def _digest(members: list[str]) -> str:
    return hashlib.sha256(json.dumps(members).encode()).hexdigest()[:16]


def _facts(practice: Practice) -> dict[str, Any]:
    return {
        "trials": {trial.name: trial.config.facts() for trial in practice.trials},
        "severities": list(practice.severities),
        "most": practice.most,
        "damage": practice.damage,
    }


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
