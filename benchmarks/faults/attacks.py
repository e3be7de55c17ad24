"""What one lying site of six does to a federation, without and with each defence, and what a defence costs.

The phantom's hospitals federate a small U-Net by FedAvg. One of them lies in every round, from the first. The
global model is scored on the test patients of the other five. Without an attack the same table says what the
defence costs an honest federation.

    weight      announces 1e15 training slices before the first round, and claims them
    claim       announces its slices, and then claims 1e15
    sign        sends w - (w_k - w), away from its optimum
    scale 10    sends w + 10 (w_k - w)
    scale 1e30  sends w + 1e30 (w_k - w)
    shapes      sends tensors of another shape, and comes first in order
    scores      claims a Dice of 1 for a million patients
    labels      trains on masks with target and background swapped
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.evaluation import Scans, mean_dice, predict
from benchmarks.harness.experiment import Experiment, Table
from benchmarks.harness.tables import table
from training.algorithm import ClientResult, Memory, State, StepContext
from training.choices.fedavg import FedAvgConfig
from training.config import NO_DEFENCE, Defence, RunConfig
from training.data.cases import Federation
from training.data.federation import load_federation
from training.engine.client import RunEnvironment
from training.engine.engine import FederationEngine
from training.engine.folder import RunFolder
from training.engine.history import RoundEntry
from training.engine.pool import Inline
from training.engine.worker import Delivery, Failure, Task
from training.errors import RoundFailed
from training.local.data import slices_of
from training.local.networks import network_of
from training.local.site import SiteData
from training.methods.fedavg import FedAvg
from training.parts.train import SCORES, WEIGHTS, Train
from training.phantom import write_federation
from training.run import Run

SITES = ("aster", "birch", "cedar", "elder", "furze", "grove")
# The first in order: it must not decide what the others have to look like.
LIAR = "aster"
NONE = "none"
CLAIM, DEFAULT = "claim", "default"
ATTACKS = (NONE, "weight", CLAIM, "sign", "scale 10", "scale 1e30", "shapes", "scores", "labels")
# Each by itself, without the default's bound.
DEFENCES: Mapping[str, Defence] = {
    NONE: NO_DEFENCE,
    DEFAULT: Defence(),
    "share 0.3": Defence(most_norm=None, most_share=0.3),
    "norm 3": Defence(most_norm=3.0),
    "norm 3, drop": Defence(most_norm=3.0, beyond="drop"),
    "median": Defence(most_norm=None, reduction="median"),
    "trimmed mean": Defence(most_norm=None, reduction="trimmed-mean", trim=0.2),
    "krum": Defence(most_norm=None, reduction="krum", liars=1),
}
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Profile:
    """How often; patients of every site, and the side of their slices; rounds, and the network's width."""

    seeds: int = 3
    patients: int = 5
    size: int = 32
    rounds: int = 8
    width: int = 4


PROFILES = {"smoke": Profile(1, 4, 16, 2, 2), "cpu": Profile()}


class Attacks(Experiment[Profile]):
    """Every attack against every defence."""

    name = "attacks"
    title = "What a lying site does"
    question = "What does one lying site of six do to a federation, and what does each defence change?"
    profiles = PROFILES
    tables = (Table("attacks"),)

    def cells(self) -> list[Cell]:
        """Seed by seed."""
        profile = self.profile
        return [
            {
                "attack": attack,
                "defence": defence,
                "seed": seed,
                "sites": len(SITES),
                "patients": profile.patients,
                "size": profile.size,
                "rounds": profile.rounds,
                "width": profile.width,
            }
            for seed in range(profile.seeds)
            for attack in ATTACKS
            for defence in DEFENCES
            # The announced size bounds the claim before any defence does.
            if attack != CLAIM or defence in (NONE, DEFAULT)
        ]

    def compute(self, cell: Cell, work: Path) -> dict[str, Any]:
        """One federation."""
        federation = _phantom(work, cell)
        config = FedAvgConfig(
            width=cell["width"],
            rounds=cell["rounds"],
            batch_size=8,
            learning_rate=0.004,
            least_steps=4,
            domain_randomisation="none",
        )
        run = Run(federation, "fedavg", config, RunConfig(seed=cell["seed"]))
        method = Lying(config, federation.task, cell["attack"])
        specs, environment, folder = run.specs(), RunEnvironment(cell["seed"]), RunFolder(work / "run")
        # What a defence costs is seen where the run goes on without the liar.
        begun = Announcing if cell["attack"] == "weight" else Inline
        pool = begun(method, specs, environment, folder.root, quorum=1)
        engine = FederationEngine(
            method, specs, environment, folder, workers=0, defence=DEFENCES[cell["defence"]], pool=pool
        )
        began = time.perf_counter()
        try:
            outcome = engine.run()
        except RoundFailed as error:
            nothing = {"dice": None, "seconds": None, "dropped": 0, "scaled": 0, "reported": 0}
            return {**nothing, "error": str(error)[:200]}
        seconds = time.perf_counter() - began
        draft = method.publication(outcome.server).models[0]
        network = network_of(draft.network, draft.weights, CPU)
        dice = []
        for site in run.sites():
            if site.name != LIAR:
                scans = Scans.load(site.of_split("test"), federation.task)
                dice.append(mean_dice(scans.dice(predict(network, scans.images))))
        rounds = [entry for entry in outcome.history if entry.phase == "train"]
        return {
            "dice": round(mean(dice), 4),
            "seconds": round(seconds, 2),
            "dropped": sum(LIAR in entry.dropped for entry in rounds),
            "scaled": sum(LIAR in entry.sites and entry.sites[LIAR].scaled is not None for entry in rounds),
            "honest": sum(_touched(entry) for entry in rounds),
            "reported": sum(_reported(entry) for entry in rounds),
        }

    def sections(self, rows: Sequence[Row]) -> list[str]:
        """Dice by attack and defence, what the default reports, then what a defence costs the honest."""
        return [_dice(rows), _reports(rows), _honest(rows)]


def _touched(entry: RoundEntry) -> int:
    """Honest sites of a round that were scaled or dropped."""
    scaled = {site for site, part in entry.sites.items() if part.scaled is not None}
    return len((scaled | set(entry.dropped)) - {LIAR})


def _reported(entry: RoundEntry) -> bool:
    """Whether the operator is warned of the liar in a round."""
    part = entry.sites.get(LIAR)
    return LIAR in entry.dropped or bool(part and {part.scaled, part.claimed, part.share} != {None})


class Announcing(Inline):
    """Sites of which the liar announces more training slices than there are."""

    def run(self, tasks: Sequence[Task]) -> Iterator[Delivery | Failure]:
        """Run the tasks; where one only loads the liar's data, say so."""
        for answer in super().run(tasks):
            if isinstance(answer, Delivery) and answer.site == LIAR and answer.images is not None:
                answer = replace(answer, images=2**50)
            yield answer


class Lying(FedAvg):
    """FedAvg at sites of which one lies."""

    def __init__(self, config: FedAvgConfig, task: Any, attack: str) -> None:
        self.attack = attack
        super().__init__(config, task)

    def training(self) -> Train:
        """Rounds with the lie."""
        return _LyingTrain(self, self.attack)


class _LyingTrain(Train):
    """Rounds in which one site lies."""

    def __init__(self, method: FedAvg, attack: str) -> None:
        super().__init__(method)
        self.attack = attack

    def step(
        self, context: StepContext, received: Mapping[str, State], memory: Memory, data: SiteData
    ) -> ClientResult:
        """The honest step, and what the liar makes of it."""
        lies = context.site == LIAR
        if lies and self.attack == "labels":
            slices = slices_of(data.train)
            data = replace(data, train=replace(slices, targets=1 - slices.targets))
        result = super().step(context, received, memory, data)
        if not lies:
            return result
        uploads = dict(result.uploads)
        sent, mine = received[WEIGHTS.name], uploads[WEIGHTS.name]
        if self.attack in _FACTORS:
            uploads[WEIGHTS.name] = _moved(sent, mine, _FACTORS[self.attack])
        elif self.attack == "shapes":
            uploads[WEIGHTS.name] = {name: tensor.reshape(1, *tensor.shape) for name, tensor in mine.items()}
        elif self.attack == "scores":
            uploads[SCORES.name] = {"score": torch.tensor([1e6, 1e6], dtype=torch.float64)}
        weight = 1e15 if self.attack in ("weight", CLAIM) else result.weight
        return replace(result, uploads=uploads, weight=weight)


_FACTORS = {"sign": -1.0, "scale 10": 10.0, "scale 1e30": 1e30}


def _moved(sent: State, mine: State, factor: float) -> State:
    """w + factor (w_k - w), as far as the type can say it."""
    return {
        name: (sent[name].double() + factor * (tensor.double() - sent[name].double()))
        .clamp(-torch.finfo(tensor.dtype).max, torch.finfo(tensor.dtype).max)
        .to(tensor.dtype)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in mine.items()
    }


def _phantom(work: Path, cell: Cell) -> Federation[Any]:
    root = write_federation(work / "data", SITES, cell["patients"], cell["size"], seed=cell["seed"])
    return load_federation(root)


def _values(rows: Sequence[Row], attack: str, defence: str, name: str) -> list[float]:
    found = (row["result"][name] for row in rows if _is(row, attack, defence))
    return [value for value in found if value is not None]


def _is(row: Row, attack: str, defence: str) -> bool:
    cell = row["cell"]
    return bool(cell["attack"] == attack and cell["defence"] == defence)


def _dice(rows: Sequence[Row]) -> str:
    lines = []
    for attack in ATTACKS:
        line = [attack]
        for defence in DEFENCES:
            dice = _values(rows, attack, defence, "dice")
            spread = f" ± {100 * stdev(dice):.1f}" if len(dice) > 1 else ""
            measured = any(_is(row, attack, defence) for row in rows)
            line.append(f"{100 * mean(dice):.1f}{spread}" if dice else "–" if measured else "")
        lines.append(line)
    head = ("attack", *DEFENCES)
    text = (
        "Dice in percent on the honest sites' test patients, mean and standard deviation over seeds. "
        "`default` is what an operator has who sets nothing; the columns after it have each defence by "
        "itself. What the server always checks (`none`) counts a `claim` as what was announced, and "
        "refuses `shapes` and `scores`: the liar is dropped from every round, so these rows are the "
        "federation of the five others, which is the measure for a defence that drops the liar. Its spread "
        "is large because with one seed five hospitals learn nothing in so few rounds, with or without a "
        "defence. A dash: the run failed. Empty: not run, since the check comes first. For the third seed "
        "the rows from `scale 10` on are of an older training but for `default` (and, under `scale 10`, "
        "`none`): compare columns of these rows by their spread."
    )
    return f"## Dice under attack\n\n{text}\n\n{table(head, lines)}"


def _reports(rows: Sequence[Row]) -> str:
    lines = []
    for attack in ATTACKS:
        found = [row for row in rows if _is(row, attack, DEFAULT)]
        if found:
            names = ("scaled", "dropped", "reported")
            counts = (str(sum(int(row["result"].get(name, 0)) for row in found)) for name in names)
            rounds = sum(int(row["cell"]["rounds"]) for row in found)
            lines.append([attack, str(rounds), *counts])
    head = ("attack", "rounds", "liar scaled", "liar dropped", "liar reported")
    text = (
        "With the default. A liar is reported where it is scaled or dropped, claims more than it announced, "
        "or has more than half of all weight. What stays within the norms of the others, as `sign` and "
        "`labels` do, is neither bounded nor seen; `median` is the defence."
    )
    return f"## What the default bounds and reports\n\n{text}\n\n{table(head, lines)}"


def _honest(rows: Sequence[Row]) -> str:
    lines = []
    for defence in DEFENCES:
        dice, plain = (_values(rows, NONE, each, "dice") for each in (defence, NONE))
        touched = _values(rows, NONE, defence, "honest")
        if dice and plain:
            lines.append(
                [
                    defence,
                    f"{100 * (mean(dice) - mean(plain)):+.1f}",
                    f"{int(sum(touched))}",
                ]
            )
    head = ("defence", "Dice, points", "honest updates scaled or dropped")
    return f"## What a defence costs without an attack\n\n{table(head, lines)}"
