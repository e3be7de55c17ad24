"""The options of `training.federate`, grouped by what they decide.

A command takes one frozen object per group. `grouped` shows Typer the fields as options of their own, in a
panel of the help for each group:

    @grouped
    def federate(training: TrainingOptions, data: DataOptions) -> None: ...

    --method fedavg --rounds 20 --data DIR
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from copy import copy
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from functools import wraps
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args, get_type_hints

import typer

from training import methods
from training.engine.limits import MOST_KEPT
from training.errors import ConfigurationError
from training.methods.installed import GROUP
from training.planning.planner import BUDGETS, Budget

if TYPE_CHECKING:
    from model_store.store import Store

DEFAULT_STORE = ".locum/store"
# The name of a method, and what else its decorator says.
_REGISTERED = re.compile(r'^@register\(\s*"([^"]+)"(.*?)^class ', re.DOTALL | re.MULTILINE)


def listed_methods() -> list[str]:
    """The names that `training.methods.registry` lists, from the sources: importing them imports torch."""
    found = [entry.name for entry in entry_points(group=GROUP)]
    for folder in methods.__path__:
        for path in Path(folder).rglob("*.py"):
            written = _REGISTERED.findall(path.read_text(encoding="utf-8"))
            found += [name for name, rest in written if "listed=False" not in rest]
    return sorted({*found})


class Engine(Enum):
    """Where the hospitals of a run are."""

    IN_PROCESS = "in-process"
    NETWORK = "network"


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """What is trained: the method and its configuration."""

    panel: ClassVar[str] = "Training"

    method: Annotated[str, typer.Option(help="One of: " + ", ".join(listed_methods()) + ".")]
    backbone: Annotated[
        str | None,
        typer.Option(help="fedins: NAME or NAME@VERSION in the store, or a file of a ViT's weights."),
    ] = None
    start: Annotated[
        str | None,
        typer.Option("--from", help="Start from NAME@VERSION in the store, or from a file of weights."),
    ] = None
    rotation_head: Annotated[
        bool,
        typer.Option(
            "--rotation-head",
            help="fedavg, iop-fl: train a head that tells quarter turns, for the preset `ttt` at a hospital.",
        ),
    ] = False
    rounds: Annotated[int | None, typer.Option(help="Rounds of training.")] = None
    loss: Annotated[
        str | None, typer.Option(help="Such as dice, dice_ce, dice_focal or tversky; the task's by default.")
    ] = None
    seed: Annotated[int | None, typer.Option(help="Of everything random in the run.")] = None
    config: Annotated[Path | None, typer.Option(help="YAML with the sections `method` and `run`.")] = None


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What it is trained on: the hospitals, and their task."""

    panel: ClassVar[str] = "Hospitals and their task"

    data: Annotated[
        Path | None, typer.Option(help="The federation's folder, or an .npz; without it, a phantom.")
    ] = None
    task: Annotated[
        str | None,
        typer.Option(help="A task.yaml or a template's name (python -m training.tasks)."),
    ] = None
    clients: Annotated[
        int | None, typer.Option(min=1, help="Sites to share an .npz out among; 5 by default.")
    ] = None
    dirichlet: Annotated[
        float | None, typer.Option(help="How evenly (large) or unevenly (small); 0.5 by default.")
    ] = None
    leave_out: Annotated[list[str] | None, typer.Option(help="A site to leave out; may be repeated.")] = None


@dataclass(frozen=True, kw_only=True)
class PlanningOptions:
    """Whether the federation plans its network first, and what the network may cost."""

    panel: ClassVar[str] = "Plan of volumes"

    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Volumes: ask the sites for counts of spacing, size and intensity first, and choose "
            "spacing, patch, batch, network and normalisation by nnU-Net's rules.",
        ),
    ] = False
    budget: Annotated[
        str | None,
        typer.Option(
            help=f"What the planned network may cost: {', '.join(BUDGETS)}, or gigabytes of a GPU; laptop by "
            "default, gpu-8gb on cuda."
        ),
    ] = None

    def chosen_budget(self, device: str) -> Budget:
        """The budget, for a run on this device. Raises ConfigurationError."""
        from training.planning.proposal import budget_of

        return budget_of(self.budget or ("laptop" if device == "cpu" else "gpu-8gb"))


@dataclass(frozen=True, kw_only=True)
class PublishingOptions:
    """What is published, where, and which sites consent to the export of their models."""

    panel: ClassVar[str] = "Publication and practice"

    out: Annotated[
        str,
        typer.Option(envvar="LOCUM_STORE", help="The store to publish to: a folder, or s3://BUCKET/PREFIX."),
    ] = DEFAULT_STORE
    name: Annotated[str | None, typer.Option(help="Name of the published model; the task's by default.")] = (
        None
    )
    consent: Annotated[
        str | None, typer.Option(help="Who agrees to the export of personal models: `all`, or SITE,SITE.")
    ] = None
    sign: Annotated[
        Path | None, typer.Option(help="A private key (python -m model_store keygen) to sign versions with.")
    ] = None
    graph_operators: Annotated[
        str,
        typer.Option(
            envvar="LOCUM_GRAPH_OPERATORS", help="Operators that graphs may have beyond the built-in list."
        ),
    ] = ""
    playbook: Annotated[
        bool,
        typer.Option(
            "--playbook",
            help="fedavg, iop-fl: practise the lens and the dose by shift on members that consent, each in "
            "turn as the hospital from outside; trains the federation once more for each of them.",
        ),
    ] = False

    def store(self) -> Store:
        """The store to publish to. Raises ConfigurationError for operators that are none, StoreError."""
        # Here and above, since help needs none of them and they take seconds.
        from model_store.graphs import operators_of
        from model_store.signing import Signer
        from model_store.store import Store

        signer = None if self.sign is None else Signer.load(self.sign)
        try:
            operators = operators_of(self.graph_operators)
        except ValueError as error:
            raise ConfigurationError("--graph-operators cannot be used", [str(error)]) from error
        return Store(self.out, signer=signer, operators=operators)

    def consenting(self) -> tuple[str, ...] | Literal["all"] | None:
        """The sites that `consent` names; None where it is not given."""
        if self.consent is None:
            return None
        if self.consent.strip() == "all":
            return "all"
        return tuple(part.strip() for part in self.consent.split(",") if part.strip())


@dataclass(frozen=True, kw_only=True)
class ExecutionOptions:
    """How the run is executed and resumed. None of it decides the result of a run in which no site failed."""

    panel: ClassVar[str] = "This run: start, resume, processes"

    workers: Annotated[int | None, typer.Option(min=0, help="Processes; decides no result.")] = None
    run: Annotated[Path | None, typer.Option(help="The run's folder; beside the store by default.")] = None
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")] = False
    resume_before: Annotated[
        str | None,
        typer.Option(help="PHASE:ROUND, such as train:17: take that round and later ones back, and go on."),
    ] = None
    keep_rounds: Annotated[
        int,
        typer.Option(
            min=1, max=MOST_KEPT, help="Rounds that can be taken back; each costs the disk a memory."
        ),
    ] = 1
    quorum: Annotated[
        int | None,
        typer.Option(min=1, help="Hospitals that must deliver in a round; all, if not given."),
    ] = None

    @property
    def resumes(self) -> bool:
        """Whether a run that is in the folder goes on."""
        return self.resume or self.resume_before is not None

    def taken_back(self) -> tuple[str, int] | None:
        """The phase and round of `resume_before`. Raises ConfigurationError."""
        if self.resume_before is None:
            return None
        phase, _, number = self.resume_before.rpartition(":")
        if not phase or not number.isdigit():
            problem = f"expected PHASE:ROUND such as train:17, found '{self.resume_before}'"
            raise ConfigurationError("--resume-before", [problem])
        return phase, int(number)


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """Where the hospitals are, and how a round waits for those on a network."""

    panel: ClassVar[str] = "Hospitals on a network"

    engine: Annotated[
        Engine, typer.Option(help="Where the hospitals are: folders here, or processes on a network.")
    ] = Engine.IN_PROCESS
    kit: Annotated[Path | None, typer.Option(help="network: the operator's kit.")] = None
    listen: Annotated[
        str | None, typer.Option(help="network: HOST:PORT to listen on, if not the kit's address.")
    ] = None
    deadline: Annotated[
        float | None,
        typer.Option(min=1, help="network: seconds after which a round drops late hospitals; with --quorum."),
    ] = None
    planned: Annotated[
        str | None, typer.Option(help="network: id of the run in the calendar, which notes when it runs.")
    ] = None
    rehearse: Annotated[
        bool,
        typer.Option("--rehearse", help="network: one round of a few steps, and what the run will take."),
    ] = False
    silence: Annotated[
        float,
        typer.Option(min=1, help="network: seconds after which a round drops a hospital that is not heard."),
    ] = 86_400


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """Where the figures of the rounds are sent."""

    panel: ClassVar[str] = "Logs elsewhere"

    tensorboard: Annotated[
        Path | None, typer.Option(help="Write TensorBoard's event files into this folder.")
    ] = None
    mlflow: Annotated[
        str | None, typer.Option(help="Send figures to the MLflow server at this URL, or to sqlite:///FILE.")
    ] = None


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator: give a command that takes option objects one parameter for each of their fields."""
    groups = {name: kind for name, kind in get_type_hints(command).items() if name != "return"}
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=_in_panel(get_type_hints(kind, include_extras=True)[field.name], kind.panel),
        )
        for kind in groups.values()
        for field in fields(kind)
    ]

    @wraps(command)
    def flat(**given: Any) -> None:
        command(
            **{
                name: kind(**{field.name: given[field.name] for field in fields(kind)})
                for name, kind in groups.items()
            }
        )

    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat


def _in_panel(annotation: Any, panel: str) -> Any:
    """The annotation of an option, with the panel of the help that shows it."""
    plain, option = get_args(annotation)
    placed = copy(option)
    placed.rich_help_panel = panel
    return Annotated[plain, placed]
