"""What `training.federate` does with its options: federate, publish, record and report."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from rich.console import Console

from model_store.errors import LocumStoreError
from model_store.store import REPORT, Store
from model_store.task import Task, TaskKind
from training.algorithm import Phase, Publication
from training.config import MethodConfig, RunConfig, parse, read_sections
from training.data.cases import Federation, RemoteSite, digest_of_sites
from training.data.classification import Partition
from training.data.federation import TASK_FILE, layout_of, load_federation
from training.engine.history import never_found
from training.errors import ConfigurationError, TrainingError, in_words, no_network_engine
from training.exit_codes import FAILED, INTERRUPTED
from training.methods.planning import PlanningConfig
from training.methods.registry import Method, fitting
from training.methods.registry import method as find_method
from training.observers import Log, MLflow, TensorBoard, WithLogs, few_notes
from training.options import (
    DataOptions,
    Engine,
    ExecutionOptions,
    LogOptions,
    NetworkOptions,
    PlanningOptions,
    PublishingOptions,
    TrainingOptions,
)
from training.phantom import phantom_of
from training.planning.planner import Budget
from training.planning.proposal import Proposal
from training.planning_round import (
    METHOD,
    plan_federation,
    planning_run,
    replanned,
    settings_of,
    with_plan,
)
from training.playbook import (
    DEFAULT,
    afterwards,
    check_practises,
    make_playbook,
    with_playbook,
)
from training.progress import open_progress
from training.progress.forecast import expected_seconds
from training.publish import check_names, parts_of
from training.record import RECORD_FILE, RunRecord
from training.run import Result, Run, execute
from training.tasks import resolve as resolve_task

if TYPE_CHECKING:
    from training.network.operator import Operator

Given = TypeVar("Given")


def run(
    training: TrainingOptions,
    data: DataOptions,
    planning: PlanningOptions,
    publishing: PublishingOptions,
    execution: ExecutionOptions,
    network: NetworkOptions,
    logging: LogOptions,
) -> None:
    """Federate as the options say. Raises typer.Exit with an exit code where it cannot go on."""
    with _failures_in_words(), ExitStack() as opened:
        chosen = find_method(training.method)
        configured = partial(_configured, chosen, training, data, publishing, network)
        method_config, run_config = configured()
        store = publishing.store()
        # Beside a store's folder; a bucket has nothing beside it.
        home = store.root.parent if isinstance(store.root, Path) else Path(".locum")
        if network.engine is Engine.NETWORK:
            _check_network(data, publishing, run_config)
            job = _Job(training.method, method_config, run_config, store, publishing.name)
            asked = (planning.chosen_budget(run_config.device), configured) if planning.plan else None
            planned = opened.enter_context(
                _over_network(job, data.task, network, execution, home / "runs", asked)
            )
        else:
            root = data.data or phantom_folder(home, chosen.kinds[0])
            federation = federation_of(data, root, run_config.seed, by_value=planning.plan)
            proposal = None
            if planning.plan:
                place = home / "runs" / f"plan-{planning_run(federation, run_config).id}"
                proposal = plan_federation(
                    federation,
                    run_config,
                    planning.chosen_budget(run_config.device),
                    place,
                    resume=execution.resumes,
                    quorum=execution.quorum,
                )
                federation = replanned(federation, proposal)
                method_config, _ = configured(proposal.options)
            name = publishing.name or federation.task.name
            check_names(name)
            prepared = method_config.prepared(store, federation.task, name)
            run = Run(federation, training.method, prepared, run_config)
            planned = _Planned(run, name, execution.run or home / "runs" / run.id, proposal=proposal)
        logs = _logs(planned, logging)
        result, warnings = _train(planned, store, execution, publishing.playbook, logs)
        _conclude(result, store, planned.folder, warnings)


@dataclass(frozen=True)
class _Planned:
    """A run to execute, the name to publish under, its folder, the hospitals if they are on a network, and
    the plan that the federation made, if it was asked for.
    """

    job: Run
    name: str
    folder: Path
    operator: Operator | None = None
    proposal: Proposal | None = None


@dataclass(frozen=True)
class _Job:
    """What hospitals on a network are to train together, and where it is published."""

    method: str
    config: MethodConfig
    settings: RunConfig
    store: Store
    name: str | None


@contextmanager
def _over_network(
    job: _Job,
    task_name: str | None,
    network: NetworkOptions,
    execution: ExecutionOptions,
    folders: Path,
    planning: tuple[Budget, Callable[[Mapping[str, Any]], tuple[MethodConfig, RunConfig]]] | None,
) -> Iterator[_Planned]:
    """Listen for the kit's hospitals and wait until they joined; stop listening at the end.

    `planning` has a plan's budget, and makes the configurations from what the plan proposes.
    """
    kit = _given_or_refused(network.kit, "kit", "the operator's kit")
    named = _given_or_refused(task_name, "task", "what the hospitals train on")
    task = resolve_task(named, for_plan=planning is not None)
    settings = job.settings
    try:
        # The extra `network` may not be installed.
        from training.network.calendar import noted
        from training.network.kits import Kit
        from training.network.operator import Listener, Operator
        from training.network.rehearsal import rehearse
        from training.network.rounds import RoundLimits
        from training.network.runs import NETWORK_FILE, NetworkRun, run_to_resume
    except ImportError as error:
        raise no_network_engine(error) from error
    opened = Kit.open(kit, server=True)
    opened.check()
    revoked = opened.revoked_sites()
    unknown = [site for site in settings.leave_out if site not in {*opened.content.sites, *revoked}]
    if unknown:
        known = ", ".join(opened.content.sites)
        raise ConfigurationError(
            "the run does not fit the kit", [f"leave_out: {unknown}; hospitals: {known}"]
        )
    sites = tuple(sorted(set(opened.content.sites) - set(settings.leave_out)))
    name = job.name or task.name
    check_names(name)
    console = Console(stderr=True)

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    if warning := opened.warning():
        say(f"warning: {warning}")
    limits = RoundLimits(network.deadline, execution.quorum, network.silence)
    if network.deadline is not None and execution.quorum is None:
        raise ConfigurationError(
            "the run cannot start",
            [
                f"--deadline: a round would go on without a hospital; say with --quorum how many of "
                f"{len(sites)} must deliver"
            ],
        )

    def gathered(operator: Operator, task: Task) -> Federation[Any]:
        operator.warn = say
        say(f"listening on {network.listen or opened.content.address} for run {operator.id[:16]}")
        joined: tuple[Any, ...] = operator.gather(
            lambda missing: say(f"waiting for {', '.join(missing)}"), resume=execution.resumes
        )
        for difference in operator.differences:
            say(f"note: {difference}")
        return Federation(folders, task, joined, False, digest_of_sites(task, joined))

    with Listener(opened, network.listen) as listener:
        method_config, proposal = job.config, None
        if planning is not None:
            budget, configured = planning
            asked = NetworkRun(sites, METHOD, PlanningConfig(), settings_of(settings), task)
            place = folders / f"plan-{asked.id}"
            if not execution.resumes:
                shutil.rmtree(place, ignore_errors=True)
            with Operator(listener, place, asked, limits, follows=True) as operator:
                federation = gathered(operator, task)
                policies = operator.policies(asked.settings.model_copy(update={"leave_out": ()}))
                proposal = plan_federation(federation, policies, budget, place, pool=operator)
            task = proposal.task
            method_config, _ = configured(proposal.options)
        config = method_config.prepared(job.store, task, name)
        run = NetworkRun(sites, job.method, config, settings, task)
        if network.rehearse:
            for sentence in rehearse(
                listener, run, folders, limits, lambda operator: gathered(operator, task)
            ):
                say(sentence)
            say("The hospitals wait for the run: give the same command without --rehearse")
            raise typer.Exit
        folder = execution.run
        if execution.resumes:
            folder, run = run_to_resume(run, opened, folders, folder)
            if gone := revoked.intersection(run.sites):
                say(f"resuming {folder} without {', '.join(sorted(gone))}: revoked since the run began")
            elif not (folder / NETWORK_FILE).exists():
                others = ", ".join(sorted(path.parent.name for path in folders.glob(f"*/{NETWORK_FILE}")))
                say(
                    f"there is no run of these settings to resume; a new one begins in {folder} "
                    f"(runs in {folders}: {others or 'none'})"
                )
        folder = folder or folders / run.id
        with Operator(listener, folder, run, limits) as operator, noted(opened, network.planned):
            federation = gathered(operator, task)
            # Sites that are left out are not in this federation.
            settings = operator.policies(settings.model_copy(update={"leave_out": ()}))
            yield _Planned(Run(federation, job.method, config, settings), name, folder, operator, proposal)


def _check_network(data: DataOptions, publishing: PublishingOptions, settings: RunConfig) -> None:
    """Reject options that only make sense with the hospitals' folders here. Raises ConfigurationError."""
    given = {
        "--data": data.data,
        "--clients": data.clients,
        "--dirichlet": data.dirichlet,
        "--playbook": publishing.playbook or None,
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


def _logs(planned: _Planned, options: LogOptions) -> list[Log]:
    """The logs that were asked for. Raises ConfigurationError."""
    job, logs = planned.job, list[Log]()
    notes = few_notes(_validated(job)) if options.tensorboard or options.mlflow else {}
    if options.tensorboard is not None:
        logs.append(TensorBoard(options.tensorboard, notes))
    if options.mlflow is not None:
        tags = {"method": job.method, "seed": str(job.settings.seed), **notes}
        logs.append(MLflow(options.mlflow, planned.name, job.id, tags))
    return logs


def _validated(job: Run) -> dict[str, int]:
    """The patients that each site validates on."""
    return {site.name: site.counts.patients.get("val", 0) for site in job.sites()}


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
            f"[bold red]error[/] {_escaped(in_words(error))}: mend it, then add --resume to the same command",
            highlight=False,
            soft_wrap=True,
        )
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        console.print("stopped; add --resume to the same command to go on", highlight=False)
        raise typer.Exit(INTERRUPTED) from None


def _configured(
    method: Method,
    training: TrainingOptions,
    data: DataOptions,
    publishing: PublishingOptions,
    network: NetworkOptions,
    proposed: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[MethodConfig, RunConfig]:
    """Both configurations: options come before the file, and the file before what a plan proposes and the
    phantom's own defaults, of which a method takes the fields that it has. Raises ConfigurationError.
    """
    method_section, run_section = read_sections(training.config)
    # Defaults suit real scans; the phantom's few slices want their own.
    phantom = data.data is None and network.engine is Engine.IN_PROCESS
    defaults = {**(phantom_of(method.kinds[0]).training if phantom else {}), **proposed}
    if training.start is not None or {"network", "network_arguments", "width"} & method_section.keys():
        # A planned network is one whole, and a start brings its own.
        for field in ("network", "network_arguments", "width"):
            defaults.pop(field, None)
    known = {field: value for field, value in defaults.items() if field in method.config.model_fields}
    options = {
        "rounds": training.rounds,
        "loss": training.loss,
        "backbone": training.backbone,
        "start": training.start,
    }
    method_options = _given({**options, "rotation_head": training.rotation_head or None})
    if training.start is not None and "start" not in method.config.model_fields:
        others = fitting(lambda each: "start" in each.config.model_fields)
        raise ConfigurationError(
            f"method '{method.name}' does not start from a version",
            [f"--from: use a method that trains one network: {others}"],
        )
    run_options = _given(
        {"leave_out": data.leave_out or None, "seed": training.seed, "consent": publishing.consenting()}
    )
    where = str(training.config) if training.config else "the options"
    return (
        parse(method.config, known | method_section | method_options, f"{where}, method {method.name}"),
        parse(RunConfig, run_section | run_options, f"{where}, run"),
    )


def federation_of(options: DataOptions, data: Path, seed: int, *, by_value: bool = False) -> Federation[Any]:
    """The federation of a folder, or of an .npz, which is shared out among made-up sites by the seed."""
    shares = _given({"clients": options.clients, "alpha": options.dirichlet})
    partition = Partition(**shares, seed=seed) if shares or data.is_file() else None
    task = resolve_task(options.task, for_plan=by_value) if options.task else None
    return load_federation(data, task, partition, by_value=by_value)


def _train(
    planned: _Planned,
    store: Store,
    execution: ExecutionOptions,
    playbook: bool,
    logs: Sequence[Log],
) -> tuple[Result, list[str]]:
    """Execute the run, with its progress shown; returns its result and the warnings that were shown."""
    job, name, folder, operator = planned.job, planned.name, planned.folder, planned.operator
    proposal = planned.proposal
    workers, taken_back = execution.workers, execution.taken_back()
    # A practice trains the federation once more without each of these.
    practising = check_practises(job) if playbook else ()
    algorithm, sites, federation = job.algorithm(), job.specs(), job.federation
    validated = _validated(job)
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
            validated,
            (1, 1 + len(practising)),
            afterwards(job, practising, DEFAULT) if practising else {},
        )
        if operator is not None:
            operator.tell(progress.warning, progress.site_working)
        if proposal is not None:
            written = " and ".join(map(str, proposal.write(folder)))
            for sentence in (
                *proposal.sentences,
                f"The plan is in {written}: edit it, and give it with --task",
            ):
                progress.note(sentence)
        if federation.inferred:
            federation.task.dump(folder / TASK_FILE)
            warnings.append(
                f"there is no {TASK_FILE} in {federation.root}; one was inferred and written to "
                f"{folder / TASK_FILE}: look at it, and put it into the federation's folder "
                f"({layout_of(federation.task).inferred(federation.task)})"
            )
        warnings += job.warnings()
        for warning in warnings:
            progress.warning(warning)

        def practise(publication: Publication) -> Publication:
            def place(run: Run) -> Path:
                return folder / "rotations" / ",".join(run.settings.leave_out) if run.id != job.id else folder

            made = make_playbook(
                job, place, DEFAULT, workers=workers, quorum=execution.quorum, progress=progress
            )
            for warning in made.warnings:
                progress.warning(warning)
            warnings.extend(made.warnings)
            return with_playbook(publication, made)

        def extend(publication: Publication) -> Publication:
            if proposal is not None:
                publication = with_plan(publication, proposal)
            return practise(publication) if playbook else publication

        observer = opened.enter_context(WithLogs(progress, logs, validated))
        result = execute(
            job,
            folder,
            workers=workers,
            resume=execution.resume,
            resume_before=taken_back,
            kept=execution.keep_rounds,
            observer=observer,
            store=store,
            name=name,
            extend=extend,
            pool=operator,
            quorum=execution.quorum if operator is None else None,
        )
        for warning in never_found(result.history):
            progress.warning(warning)
        for artefact in result.artefacts:
            progress.published(str(artefact), artefact.digest)
    return result, warnings


def _locum() -> str:
    """Return the command as this shell finds it: in an environment that is not active, by its path."""
    own = Path(sys.executable).with_name("locum")
    if shutil.which("locum") is not None or not own.exists():
        return "locum"
    here = Path.cwd()
    return shlex.quote(str(own.relative_to(here) if own.is_relative_to(here) else own))


def _conclude(result: Result, store: Store, folder: Path, warnings: list[str]) -> None:
    """Write record, report and each site's overlays, and say where everything is."""
    # Drawing is needed once, at the end, here; worker processes import this module when they start.
    from training.report import judged_in_words, write_report, write_site_pages

    record = RunRecord.of(result, warnings)
    # First: it has all that the report shows, should the drawing fail.
    written = record.write(folder / RECORD_FILE)
    report = write_report(record, folder / REPORT, result.publication)
    # The service shows it to operators.
    store.attach_report(result.artefacts[-1], report.read_bytes())
    said = record.said.lines
    lines = {
        **dict(zip(("verdict", "own"), said, strict=False)),
        "model": f"{result.artefacts[-1]}   in {store.root}",
        "record": str(written),
        "report": str(report),
    }
    if record.details.get("judged"):
        lines["parent"] = judged_in_words(record)
    pages = write_site_pages(result, folder)
    if pages:
        lines["overlays"] = f"{folder / 'sites' / 'SITE'}   of {', '.join(pages)}, for each of them alone"
    lines["serve it"] = (
        f"{_locum()} serve --store {shlex.quote(str(store.root))}   then open http://127.0.0.1:8000"
    )
    console = Console()
    for label, value in lines.items():
        console.print(f"{label:>8}  {_escaped(value)}", highlight=False, soft_wrap=True)
    plan = result.run.algorithm().plan()
    consented = {step.name for step in plan if isinstance(step, Phase) and step.consent}
    unexported = [entry for entry in result.history if entry.phase in consented and not entry.sites]
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


def phantom_folder(folder: Path, kind: TaskKind) -> Path:
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
