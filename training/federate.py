"""Federate the hospitals of a folder and publish what they learned.

    python -m training.federate --method iop-fl --data DIR --out STORE --consent all

Without --data, the phantom federation is written and used. An error is printed as a message, with exit code
2; a run that was killed continues with --resume. Hospitals that keep their folders take part over a network:

    python -m training.federate --engine network --kit KITS/server --task task.yaml --method iop-fl
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from rich.console import Console

from model_store.errors import LocumStoreError
from model_store.graphs import operators_of
from model_store.signing import Signer
from model_store.store import REPORT, Store
from model_store.task import Task, TaskKind
from training.algorithm import Publication
from training.config import MethodConfig, RunConfig, parse, read_sections
from training.data.cases import Federation, RemoteSite, digest_of_sites
from training.data.classification import Partition
from training.data.federation import TASK_FILE, load_federation
from training.engine.folder import MOST_KEPT
from training.errors import ConfigurationError, TrainingError
from training.methods.registry import Method, methods
from training.methods.registry import method as find_method
from training.observers import Log, MLflow, TensorBoard, WithLogs
from training.phantom import phantom_of
from training.playbook import DEFAULT, check_practises, make_playbook, with_playbook
from training.progress import open_progress
from training.progress.forecast import expected_seconds
from training.publish import check_names, parts_of
from training.record import RECORD_FILE, RunRecord
from training.run import Result, Run, execute
from training.tasks import resolve as resolve_task

if TYPE_CHECKING:
    from training.network.operator import Operator

DEFAULT_STORE = ".locum/store"
FAILED, INTERRUPTED = 2, 130
Given = TypeVar("Given")


class Engine(Enum):
    """Where the hospitals of a run are."""

    IN_PROCESS = "in-process"
    NETWORK = "network"


def federate(
    method: Annotated[str, typer.Option(help="One of: " + ", ".join(methods()) + ".")],
    data: Annotated[
        Path | None, typer.Option(help="The federation's folder, or an .npz; without it, a phantom.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="A task.yaml or a template's name (python -m training.tasks)."),
    ] = None,
    out: Annotated[
        str,
        typer.Option(envvar="LOCUM_STORE", help="The store to publish to: a folder, or s3://BUCKET/PREFIX."),
    ] = DEFAULT_STORE,
    backbone: Annotated[
        str | None,
        typer.Option(help="fedins: NAME[@VERSION] in the store, or a ViT's weights (.npz, .safetensors)."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the published model; the task's by default.")
    ] = None,
    clients: Annotated[
        int | None, typer.Option(min=1, help="Sites to share an .npz out among; 5 by default.")
    ] = None,
    dirichlet: Annotated[
        float | None, typer.Option(help="How evenly (large) or unevenly (small); 0.5 by default.")
    ] = None,
    leave_out: Annotated[list[str] | None, typer.Option(help="A site to leave out; may be repeated.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of training.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of everything random in the run.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML with the sections `method` and `run`.")] = None,
    workers: Annotated[int | None, typer.Option(min=0, help="Processes; decides no result.")] = None,
    consent: Annotated[
        str | None, typer.Option(help="Who agrees to the export of personal models: `all`, or SITE,SITE.")
    ] = None,
    run: Annotated[Path | None, typer.Option(help="The run's folder; beside the store by default.")] = None,
    sign: Annotated[
        Path | None, typer.Option(help="A private key (python -m model_store keygen) to sign versions with.")
    ] = None,
    graph_operators: Annotated[
        str,
        typer.Option(
            envvar="LOCUM_GRAPH_OPERATORS", help="Operators that graphs may have beyond the built-in list."
        ),
    ] = "",
    playbook: Annotated[
        bool,
        typer.Option(
            "--playbook",
            help="iop-fl: practise on members that consent, each in turn as the hospital from outside; "
            "trains the federation once more for each of them.",
        ),
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")] = False,
    resume_before: Annotated[
        str | None,
        typer.Option(help="PHASE:ROUND, such as train:17: take that round and later ones back, and go on."),
    ] = None,
    keep_rounds: Annotated[
        int,
        typer.Option(
            min=1, max=MOST_KEPT, help="Rounds that can be taken back; each costs the disk a memory."
        ),
    ] = 1,
    engine: Annotated[
        Engine, typer.Option(help="Where the hospitals are: folders here, or processes on a network.")
    ] = Engine.IN_PROCESS,
    kit: Annotated[Path | None, typer.Option(help="network: the operator's kit.")] = None,
    listen: Annotated[
        str | None, typer.Option(help="network: HOST:PORT to listen on, if not the kit's address.")
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(min=1, help="network: seconds after which a round drops late hospitals.")
    ] = None,
    quorum: Annotated[
        int, typer.Option(min=1, help="network: hospitals that must deliver before a round ends.")
    ] = 1,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Write TensorBoard's event files into this folder.")
    ] = None,
    mlflow: Annotated[str | None, typer.Option(help="Send figures to the MLflow server at this URL.")] = None,
) -> None:
    """Federate the hospitals of a folder and publish what they learned."""
    with _failures_in_words(), ExitStack() as opened:
        chosen = find_method(method)
        method_config, run_config = _configured(
            chosen,
            config,
            {"rounds": rounds, "backbone": backbone},
            {"leave_out": leave_out or None, "seed": seed, "consent": _consent(consent)},
            # Defaults suit real scans; the phantom's few slices want their own.
            phantom_of(chosen.kinds[0]).training if data is None and engine is Engine.IN_PROCESS else {},
        )
        signer = None if sign is None else Signer.load(sign)
        store = Store(out, signer=signer, operators=_operators(graph_operators))
        # Beside a store's folder; a bucket has nothing beside it.
        home = store.root.parent if isinstance(store.root, Path) else Path(".locum")
        if engine is Engine.NETWORK:
            _check_network(data, clients, dirichlet, playbook, run_config)
            planned = opened.enter_context(
                _over_network(
                    _given_or_refused(kit, "kit", "the operator's kit"),
                    resolve_task(_given_or_refused(task, "task", "what the hospitals train on")),
                    method,
                    method_config,
                    run_config,
                    store,
                    name,
                    run,
                    home / "runs",
                    deadline,
                    quorum,
                    listen,
                    resume or resume_before is not None,
                )
            )
        else:
            federation = _federation(
                data or _phantom(home, chosen.kinds[0]),
                task,
                {"clients": clients, "alpha": dirichlet},
                run_config.seed,
            )
            name = name or federation.task.name
            check_names(name)
            job = Run(federation, method, method_config.prepared(store, federation.task, name), run_config)
            planned = _Planned(job, name, run or home / "runs" / job.id)
        going_on = GoingOn(resume, _round_of(resume_before), keep_rounds)
        logs = _logs(planned, tensorboard, mlflow)
        result, warnings = _train(planned, store, workers, going_on, playbook, logs)
        _conclude(result, store, planned.folder, warnings)


@dataclass(frozen=True)
class _Planned:
    """A run to execute, the name to publish under, its folder, and the hospitals if they are on a network."""

    job: Run
    name: str
    folder: Path
    operator: Operator | None = None


@contextmanager
def _over_network(
    kit: Path,
    task: Task,
    method: str,
    config: MethodConfig,
    settings: RunConfig,
    store: Store,
    name: str | None,
    folder: Path | None,
    folders: Path,
    deadline: float | None,
    quorum: int,
    listen: str | None,
    resume: bool,
) -> Iterator[_Planned]:
    """Listen for the kit's hospitals and wait until they joined; stop listening at the end."""
    try:
        # The extra `network` may not be installed.
        from training.network.kits import Kit
        from training.network.operator import NETWORK_FILE, Operator, RoundLimits, network_id, run_to_resume
    except ImportError as error:
        raise ConfigurationError(
            "the network engine is not installed", [f"{error}; pip install 'locum[network]'"]
        ) from error
    opened = Kit.open(kit, server=True)
    revoked = opened.revoked_sites()
    unknown = [site for site in settings.leave_out if site not in {*opened.content.sites, *revoked}]
    if unknown:
        known = ", ".join(opened.content.sites)
        raise ConfigurationError(
            "the run does not fit the kit", [f"leave_out: {unknown}; hospitals: {known}"]
        )
    sites = tuple(sorted(set(opened.content.sites) - set(settings.leave_out)))
    name = name or task.name
    check_names(name)
    config = config.prepared(store, task, name)
    console = Console(stderr=True)

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    def id_of(names: Sequence[str]) -> str:
        return network_id(method, config, settings, task, names)

    if resume:
        folder, sites = run_to_resume(opened, folder, folders, sites, id_of)
        if gone := revoked.intersection(sites):
            say(f"resuming {folder} without {', '.join(sorted(gone))}: revoked since the run began")
        elif not (folder / NETWORK_FILE).exists():
            others = ", ".join(sorted(path.parent.name for path in folders.glob(f"*/{NETWORK_FILE}")))
            say(
                f"there is no run of these settings to resume; a new one begins in {folder} "
                f"(runs in {folders}: {others or 'none'})"
            )
    folder = folder or folders / id_of(sites)
    limits = RoundLimits(deadline, quorum)
    with Operator(opened, folder, sites, method, config, settings, task, limits, listen) as operator:
        say(f"listening on {listen or opened.content.address}")
        joined: tuple[Any, ...] = operator.gather(
            lambda missing: say(f"waiting for {', '.join(missing)}"), resume=resume
        )
        federation: Federation[Any] = Federation(folder, task, joined, False, digest_of_sites(task, joined))
        # Sites that are left out are not in this federation.
        settings = operator.policies(settings.model_copy(update={"leave_out": ()}))
        yield _Planned(Run(federation, method, config, settings), name, folder, operator)


def _check_network(
    data: Path | None, clients: int | None, dirichlet: float | None, playbook: bool, settings: RunConfig
) -> None:
    """Reject options that only make sense with the hospitals' folders here. Raises ConfigurationError."""
    given = {
        "--data": data,
        "--clients": clients,
        "--dirichlet": dirichlet,
        "--playbook": playbook or None,
        "--consent": settings.consent or None,
        "egress": settings.egress or None,
        "feature_bounds": settings.feature_bounds or None,
        "privacy_demands": settings.privacy_demands or None,
    }
    problems = [
        f"{option}: each hospital decides this with its own folder and policy"
        for option, value in given.items()
        if value is not None
    ]
    if problems:
        raise ConfigurationError("the options do not fit --engine network", problems)


def _logs(planned: _Planned, tensorboard: Path | None, mlflow: str | None) -> list[Log]:
    """The logs that were asked for. Raises ConfigurationError."""
    job, logs = planned.job, list[Log]()
    if tensorboard is not None:
        logs.append(TensorBoard(tensorboard))
    if mlflow is not None:
        tags = {"method": job.method, "seed": str(job.settings.seed)}
        logs.append(MLflow(mlflow, planned.name, job.id, tags))
    return logs


def _given_or_refused(value: Given | None, option: str, what: str) -> Given:
    if value is None:
        raise ConfigurationError(
            "the options do not fit --engine network", [f"--{option} is missing: {what}"]
        )
    return value


@contextmanager
def _failures_in_words() -> Iterator[None]:
    """End the command with a message and an exit code where it cannot go on."""
    console = Console(stderr=True)
    try:
        yield
    except (TrainingError, LocumStoreError) as error:
        console.print(f"[bold red]error[/] {_escaped(error)}", highlight=False, soft_wrap=True)
        raise typer.Exit(FAILED) from None
    except OSError as error:
        console.print(
            f"[bold red]error[/] {_escaped(error)}: mend it, then add --resume to the same command",
            highlight=False,
            soft_wrap=True,
        )
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        console.print("stopped; add --resume to the same command to go on", highlight=False)
        raise typer.Exit(INTERRUPTED) from None


def _operators(text: str) -> tuple[str, ...]:
    try:
        return operators_of(text)
    except ValueError as error:
        raise ConfigurationError("--graph-operators cannot be used", [str(error)]) from error


def _configured(
    method: Method,
    file: Path | None,
    method_options: Mapping[str, Any],
    run_options: Mapping[str, Any],
    defaults: Mapping[str, Any],
) -> tuple[MethodConfig, RunConfig]:
    """Both configurations: options come before the file, and the file before `defaults`, of which a method
    takes the fields that it has. Raises ConfigurationError.
    """
    method_section, run_section = read_sections(file)
    known = {field: value for field, value in defaults.items() if field in method.config.model_fields}
    where = str(file) if file else "the options"
    return (
        parse(
            method.config, known | method_section | _given(method_options), f"{where}, method {method.name}"
        ),
        parse(RunConfig, run_section | _given(run_options), f"{where}, run"),
    )


def _federation(
    data: Path, task: str | None, shares: Mapping[str, float | None], seed: int
) -> Federation[Any]:
    """The federation of a folder, or of an .npz, which is shared out among made-up sites by the seed."""
    given = _given(shares)
    partition = Partition(**given, seed=seed) if given or data.is_file() else None
    return load_federation(data, resolve_task(task) if task else None, partition)


@dataclass(frozen=True)
class GoingOn:
    """Whether a run goes on from its folder, the round from which on it is repeated, and rounds to keep."""

    resume: bool
    before: tuple[str, int] | None
    kept: int


def _round_of(text: str | None) -> tuple[str, int] | None:
    if text is None:
        return None
    phase, _, number = text.rpartition(":")
    if not phase or not number.isdigit():
        problem = f"expected PHASE:ROUND such as train:17, found '{text}'"
        raise ConfigurationError("--resume-before", [problem])
    return phase, int(number)


def _train(
    planned: _Planned,
    store: Store,
    workers: int | None,
    going_on: GoingOn,
    playbook: bool,
    logs: Sequence[Log],
) -> tuple[Result, list[str]]:
    """Execute the run, with its progress shown; returns its result and the warnings that were shown."""
    job, name, folder, operator = planned.job, planned.name, planned.folder, planned.operator
    if playbook:
        check_practises(job)
    algorithm, sites, federation = job.algorithm(), job.specs(), job.federation
    # What cannot be published, or a store that cannot be written to, is better known now than after training.
    check_names(name, parts_of(algorithm, sites))
    store.prepare()
    folder.mkdir(parents=True, exist_ok=True)
    warnings: list[str] = []
    with open_progress() as progress, ExitStack() as opened:
        progress.run_started(
            f"{job.method} on {name}",
            algorithm.plan(),
            [site.name for site in sites],
            # Hospitals on a network have other machines than this one.
            {} if operator else expected_seconds(job, workers),
            {site.name: site.counts.patients.get("val", 0) for site in job.sites()},
        )
        if operator is not None:
            operator.warn = progress.warning
        if federation.inferred:
            federation.task.dump(folder / TASK_FILE)
            warnings.append(
                f"there is no {TASK_FILE} in {federation.root}; one was inferred and written to "
                f"{folder / TASK_FILE}: look at it, and put it into the federation's folder"
            )
        warnings += job.warnings()
        for warning in warnings:
            progress.warning(warning)

        def practise(publication: Publication) -> Publication:
            def place(run: Run) -> Path:
                return folder / "rotations" / ",".join(run.settings.leave_out) if run.id != job.id else folder

            made = make_playbook(job, place, DEFAULT, workers=workers, progress=progress)
            for warning in made.warnings:
                progress.warning(warning)
            warnings.extend(made.warnings)
            return with_playbook(publication, made)

        observer = opened.enter_context(WithLogs(progress, logs))
        result = execute(
            job,
            folder,
            workers=workers,
            resume=going_on.resume,
            resume_before=going_on.before,
            kept=going_on.kept,
            observer=observer,
            store=store,
            name=name,
            extend=practise if playbook else None,
            pool=operator,
        )
        for artefact in result.artefacts:
            progress.published(str(artefact), artefact.digest)
    return result, warnings


def _conclude(result: Result, store: Store, folder: Path, warnings: list[str]) -> None:
    """Write record, report and each site's overlays, and say where everything is."""
    # Drawing is needed once, at the end, here; worker processes import this module when they start.
    from training.report import write_report, write_site_pages

    record = RunRecord.of(result, warnings)
    # First: it has all that the report shows, should the drawing fail.
    written = record.write(folder / RECORD_FILE)
    report = write_report(record, folder / REPORT, result.publication)
    # The service shows it to operators.
    store.attach_report(result.artefacts[-1], report.read_bytes())
    lines = {
        "model": f"{result.artefacts[-1]}   in {store.root}",
        "record": str(written),
        "report": str(report),
    }
    pages = write_site_pages(result, folder)
    if pages:
        lines["overlays"] = f"{folder / 'sites' / 'SITE'}   of {', '.join(pages)}, for each of them alone"
    console = Console()
    for label, value in lines.items():
        console.print(f"{label:>8}  {_escaped(value)}", highlight=False, soft_wrap=True)
    unexported = [entry for entry in result.history if entry.phase == "export" and not entry.sites]
    if unexported:
        consent = (
            "have hospitals set `consents: true` in their policies, add --resume, and have them join again"
            if any(isinstance(site, RemoteSite) for site in result.run.federation.sites)
            else "add --resume and --consent all, or --consent SITE,SITE"
        )
        console.print(
            "No hospital agreed to the export of its personal model: only the global model was published.\n"
            f"To publish the others too, {consent}: nothing is trained again.",
            highlight=False,
            soft_wrap=True,
        )


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a person gave."""
    return {field: value for field, value in options.items() if value is not None}


def _consent(text: str | None) -> tuple[str, ...] | Literal["all"] | None:
    if text is None:
        return None
    if text.strip() == "all":
        return "all"
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _phantom(folder: Path, kind: TaskKind) -> Path:
    """The phantom federation for tasks of a kind, written once, into a folder."""
    phantom = phantom_of(kind)
    root = folder / phantom.name
    if not root.exists():
        staged = root.with_name(f"{root.name}-{os.getpid()}")
        phantom.write(staged)
        try:
            staged.rename(root)
        except OSError:
            # Another process was quicker, with the same bytes.
            shutil.rmtree(staged)
    return root


def _escaped(value: object) -> str:
    return str(value).replace("[", "\\[")


if __name__ == "__main__":
    typer.run(federate)
