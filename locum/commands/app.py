"""The commands, their help, and which exit code an error has."""

from __future__ import annotations

import sys
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from locum.commands.exit_codes import DONE, FAILED, INTERRUPTED, NOT_ALLOWED, UNREACHABLE, USAGE
from locum.errors import LocumError, NotAllowed, Unreachable

_HERE, _SCANS = "On this machine", "Scans, at a running service"
_FIT, _DECIDE, _SETTINGS = "Fit a model to a hospital", "Decide what serves a hospital", "Connection"
_WATCH = "Watch what is answered"
_ROOM: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
    "add_help_option": False,
}
_EXAMPLES = """Examples

\b
  locum demo                                    see it work, in a minute
  locum serve --store store                     serve a store on this machine
  locum segment scans/ -m phantom -o masks      masks and a table of volumes
  locum adapt scans/ -m phantom -H dune -f      fit a model to a hospital
  locum watch -H dune                           what changed, and since when

Exit codes

\b
  0 done          3 no service answers          130 interrupted
  1 rejected      4 not allowed                 watch: 1 where an alarm waits
  2 wrong usage or input

LOCUM_URL has the service's address, LOCUM_KEY the API key; `locum login` keeps both.
"""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[
    str | None,
    typer.Option("--model", "-m", help="name, name@3 or name@sha256:…; not needed where one is offered."),
]
Hospital = Annotated[
    str | None, typer.Option("--hospital", "-H", help="The scans' hospital.", envvar="LOCUM_HOSPITAL")
]
Named = Annotated[str, typer.Option("--hospital", "-H", help="The hospital's id.", envvar="LOCUM_HOSPITAL")]
Scans = Annotated[
    list[str], typer.Argument(help="Files, folders, globs; a folder of DICOM files is one series.")
]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder for the results.")]
Personalization = Annotated[
    str | None, typer.Option(help="The model: auto (default), global, member, hospital or scan.")
]
Site = Annotated[str | None, typer.Option(help="With --personalization member: the site.")]
Guard = Annotated[
    str | None, typer.Option(help="For a scan unlike the training scans: auto (default), warn or refuse.")
]
Parallel = Annotated[int, typer.Option("--jobs", "-j", min=1, max=32, help="Scans sent at a time.")]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", help="An option of the adaptation, as epochs=5; may be repeated."),
]
CohortName = Annotated[
    str | None, typer.Option("--name", help="What to call the cohort; it must not name a patient.")
]
CohortNote = Annotated[
    str | None, typer.Option("--note", help="A note on the cohort; it must not name a patient.")
]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Follow the job to its end.")]
Actor = Annotated[
    str | None, typer.Option(help="Who decides; by default you, where the service knows no caller.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Reason = Annotated[str, typer.Option("--reason", "-r", help="Why; the log keeps it.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        from locum.client import version_of_client

        typer.echo(f"locum {version_of_client()}")
        raise typer.Exit(DONE)


@app.callback(epilog=_EXAMPLES)
def locum(
    _: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Serve segmentation models that are fitted to each hospital, and use them. For research use only."""


# `python -m MODULE`, called NAME in its help and errors. Its arguments are NAME MODULE ARGUMENT ….
_RUN_AS = (
    "import runpy, sys; del sys.argv[0]; module = sys.argv.pop(1); "
    "runpy.run_module(module, run_name='__main__')"
)


def _start(name: str, module: str, arguments: list[str]) -> None:
    """Become `python -m MODULE`, called `name`: its signals, output and exit code are the command's own.

    Modules of the working folder are not imported (-P), nor by the processes that it starts: a folder may
    have packages of the same names, as `service`.
    """
    import os

    # The parent of a module is imported to find it: only this package's own, not one of the working folder.
    room = module if module.startswith("locum.") else module.partition(".")[0]
    if find_spec(room) is None:
        raise _Missing(
            f"{module} is not installed: this is the client alone (locum-client); `pip install -c "
            "constraints.txt .` in a checkout of Locum installs all of it"
        )
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", _RUN_AS, name, module, *arguments]
    if os.name == "nt":
        import subprocess

        # exec would return to the shell at once there.
        raise typer.Exit(subprocess.run(command, env=environment, check=False).returncode)
    os.execve(sys.executable, command, environment)


class _Missing(LocumError): ...


@app.command(rich_help_panel=_HERE, **_ROOM)
def demo(context: typer.Context) -> None:
    """Serve a trained model, and fit it to a scan from outside; --train trains it first."""
    _start(context.command_path, "locum.demo", context.args)


@app.command(rich_help_panel=_HERE, **_ROOM)
def serve(context: typer.Context) -> None:
    """Serve a store over HTTP, with a worker; `locum serve keys create …` makes API keys."""
    _start(context.command_path, "service", context.args)


@app.command(rich_help_panel=_HERE, **_ROOM)
def train(context: typer.Context) -> None:
    """Train a federation of hospitals, and publish the model."""
    _start(context.command_path, "training.federate", context.args)


@app.command(rich_help_panel=_HERE, **_ROOM)
def compare(context: typer.Context) -> None:
    """Compare methods on a federation's folder, as a table with paired intervals that resumes."""
    _start(context.command_path, "training.compare", context.args)


@app.command(rich_help_panel=_HERE, **_ROOM)
def plan(context: typer.Context) -> None:
    """Plan spacing, patch and network for the volumes of hospitals, and train nothing."""
    _start(context.command_path, "training.plan", context.args)


@app.command(rich_help_panel=_HERE, **_ROOM)
def site(context: typer.Context) -> None:
    """Take part in a federation over the network, as one hospital."""
    _start(context.command_path, "training.site", context.args)


@app.command(rich_help_panel=_HERE, **_ROOM)
def federation(context: typer.Context) -> None:
    """Make, renew and revoke the kits of hospitals on a network, and see who is here and ready."""
    _start(context.command_path, "training.network", context.args)


@app.command(rich_help_panel=_HERE, **_ROOM)
def store(context: typer.Context) -> None:
    """List, show, verify, sign, withdraw and prune the versions of a store."""
    _start(context.command_path, "model_store", context.args)


@app.command(rich_help_panel=_HERE, **_ROOM)
def distance(context: typer.Context) -> None:
    """Say how far the scans of a folder are from those that a model was trained on; nothing is sent."""
    _start(context.command_path, "service.distance", context.args)


@app.command(rich_help_panel=_HERE, **_ROOM)
def doctor(context: typer.Context) -> None:
    """Say what this machine has, what the service will use, and what is wrong."""
    _start("locum", "service", ["doctor", *context.args])


@app.command(rich_help_panel=_HERE, **_ROOM)
def backup(context: typer.Context) -> None:
    """Copy a service's database, files and store into a new folder, while it runs."""
    _start("locum", "service", ["backup", *context.args])


@app.command(rich_help_panel=_HERE, **_ROOM)
def restore(context: typer.Context) -> None:
    """Restore a backup, or rehearse that: digests, audit trail, and one answer per hospital."""
    _start("locum", "service", ["restore", *context.args])


@app.command(rich_help_panel=_SCANS)
def segment(
    paths: Annotated[
        list[str] | None,
        typer.Argument(help="Files, folders, globs; a folder of DICOM files is one series."),
    ] = None,
    channel: Annotated[
        list[str] | None,
        typer.Option(help="A channel of one scan, as T1=t1.nii.gz; repeated for each, in place of PATHS."),
    ] = None,
    model: Model = None,
    hospital: Hospital = None,
    out: Out = Path("masks"),
    personalization: Personalization = None,
    site: Site = None,
    guard: Guard = None,
    series: Annotated[
        str | None,
        typer.Option(help="The series to take of a DICOM study: its number, its UID or the end of that."),
    ] = None,
    also: Annotated[
        str | None,
        typer.Option(help="A second file per scan: overlay, dicom-seg, dicom-sr, dicom-rtstruct or nrrd."),
    ] = None,
    jobs: Parallel = 4,
    again: Annotated[bool, typer.Option("--again", help="Also scans that have a mask already.")] = False,
) -> None:
    """Segment scans: a mask and a report for each, and volumes.csv of all.

    The same command goes on after an interruption. Files of one case, named by the channels of the model
    (case7_T1) or by number (case7_0000), are one scan.

    \b
      locum segment scan.nii.gz --model phantom --hospital aster
      locum segment --channel T1=t1.nii.gz --channel FLAIR=flair.nii.gz --model brain
      locum segment scans/ 'more/*.nii.gz' --model phantom -o masks
      locum segment study/ --model brain --series 4 --also dicom-seg
    """
    from locum.commands.batch import segment_all

    asked = _given(
        model=model, hospital=hospital, personalization=personalization, site=site, guard=guard, series=series
    )
    raise typer.Exit(segment_all(paths or [], channel or [], out, asked, also, jobs, again))


@app.command(rich_help_panel=_SCANS)
def classify(
    paths: Scans,
    model: Model = None,
    hospital: Hospital = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File for the table (CSV).")] = None,
    personalization: Personalization = None,
    site: Site = None,
    guard: Guard = None,
    jobs: Parallel = 4,
) -> None:
    """Classify scans: one line for each, and a table of all with --out.

    \b
      locum classify images/*.png --model shapes --hospital north -o classes.csv
    """
    from locum.commands.batch import classify_all

    asked = _given(model=model, hospital=hospital, personalization=personalization, site=site, guard=guard)
    raise typer.Exit(classify_all(paths, out, asked, jobs))


@app.command(rich_help_panel=_FIT)
def register(
    hospital: Annotated[str, typer.Argument(help="Its id: letters, digits, - and _.")],
    name: Annotated[str | None, typer.Option(help="Its name; the id by default.")] = None,
    site: Annotated[str | None, typer.Option(help="The site, for a member of the federation.")] = None,
    share: Annotated[
        bool | None,
        typer.Option("--share/--no-share", help="Whether the site's own model answers other hospitals too."),
    ] = None,
) -> None:
    """Register a hospital.

    \b
      locum register dune --name 'Dune Hospital'
    """
    from locum.commands.fitting import register as run

    run(hospital, name, site, share)


@app.command("join", hidden=True)  # its name of before, when masks had a command of their own
@app.command(rich_help_panel=_FIT)
def adapt(
    paths: Scans,
    hospital: Named,
    masks: Annotated[
        Path | None,
        typer.Option(
            help="Folder of masks, named as their scans, or NAME-mask; beside the scans by default, as "
            "NAME-mask."
        ),
    ] = None,
    model: Model = None,
    option: Options = None,
    name: CohortName = None,
    note: CohortNote = None,
    cohort: Annotated[str | None, typer.Option(help="Add to this cohort, as after an interruption.")] = None,
    follow: Follow = False,
    jobs: Parallel = 4,
) -> None:
    """Fit a model to a hospital by its scans, with masks of some or without. The job makes a candidate.

    Whether a model needs masks, `locum status` says. What would be rejected is not sent.

    \b
      locum adapt scans/ --model phantom --hospital dune --follow
      locum adapt scans/ --masks masks/ --model any-organ --hospital dune --follow
    """
    from locum.commands.fitting import fit

    raise typer.Exit(fit(paths, masks, hospital, model, option or [], (name, note), cohort, follow, jobs))


@app.command(rich_help_panel=_DECIDE)
def accept(
    model: Annotated[
        str, typer.Argument(help="name, name@3 or name@sha256:…; without a version, the one that serves.")
    ],
    hospital: Named,
    scans: Annotated[
        list[str] | None, typer.Option("--scans", help="Files, folders, globs; may be repeated.")
    ] = None,
    masks: Annotated[
        Path | None, typer.Option(help="Folder of masks, named as their scans, or NAME-mask.")
    ] = None,
    thresholds: Annotated[
        Path | None,
        typer.Option(
            help="What is asked of each label; acceptance.yaml in this folder by default, where it is."
        ),
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="float32, int8 or float16; that of the assignment by default.")
    ] = None,
    cohort: Annotated[
        str | None, typer.Option(help="A cohort that is there, with more scans or as it is.")
    ] = None,
    pacs: Annotated[
        tuple[str, str, str] | None,
        typer.Option(
            help="A PACS, a study and a series there: the answer is stored there, and compared with itself.",
            metavar="NAME STUDY SERIES",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for acceptance.html and acceptance.json.")
    ] = None,
    as_json: AsJson = False,
    actor: Annotated[
        str | None, typer.Option(help="Who measures; by default you, where the service knows no caller.")
    ] = None,
    jobs: Parallel = 4,
) -> None:
    """Score a version on a hospital's scans with masks, as it answers them, and report.

    Exit code 1 where the thresholds are not met, or the masks are too few for a verdict. Another person
    decides on the report: `locum approve`.

    \b
      locum accept liver@3 --hospital north --scans scans --masks masks -o acceptance
      locum accept liver@3 --hospital north --cohort 5c0e… --thresholds acceptance.yaml --json
    """
    from locum.commands.accepting import accept as run

    asked = (model, thresholds, precision)
    raise typer.Exit(run(asked, pacs, hospital, scans or [], masks, cohort, out, as_json, actor, jobs))


@app.command(rich_help_panel=_DECIDE)
def approve(
    job: Annotated[str, typer.Argument(help="The job that measured.")],
    reason: Reason,
    reject: Annotated[bool, typer.Option("--reject", help="Reject the version.")] = False,
    override: Annotated[
        bool, typer.Option("--override", help="Accept although the thresholds are not met; it is recorded.")
    ] = False,
    actor: Actor = None,
) -> None:
    """Accept a version at a hospital by the report of `locum accept`, as another person than measured.

    \b
      locum approve 0f3a… --reason 'all 14 masks looked at'
      locum approve 0f3a… --reject --reason 'misses small lesions'
    """
    from locum.commands.accepting import decide

    decide(job, not reject, reason, override, actor)


@app.command(rich_help_panel=_DECIDE)
def acceptances(
    hospital: Named,
    demand: Annotated[
        bool | None,
        typer.Option(
            "--demand/--no-demand", help="Whether a version needs an acceptance before it is assigned."
        ),
    ] = None,
    reason: Annotated[str | None, typer.Option("--reason", "-r", help="Why, with --demand.")] = None,
    as_json: AsJson = False,
    actor: Actor = None,
) -> None:
    """Show what was accepted at a hospital, and whether it demands that before an assignment.

    \b
      locum acceptances --hospital north
      locum acceptances --hospital north --demand --reason 'our quality manual, 4.2'
    """
    from locum.commands.accepting import set_demand, show

    if demand is not None:
        if reason is None:
            raise typer.BadParameter("--demand needs --reason: the audit trail keeps it")
        set_demand(hospital, demand, reason, actor)
    show(hospital, as_json)


@app.command(rich_help_panel=_FIT)
def status(
    job: Annotated[
        str | None, typer.Argument(help="A job's id; the service and its newest jobs when left out.")
    ] = None,
    hospital: Hospital = None,
    follow: Follow = False,
) -> None:
    """Show the service, or a job and the verdict on its candidate.

    \b
      locum status
      locum status 0f3a… --follow
    """
    from locum.commands.fitting import show_job, show_service

    raise typer.Exit(show_service(hospital) if job is None else show_job(job, follow))


@app.command(rich_help_panel=_DECIDE)
def assign(
    version: Annotated[str, typer.Argument(help="name@number; of name.at-HOSPITAL@number the rest follows.")],
    reason: Reason,
    hospital: Hospital = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="For which it serves; its own name by default.")
    ] = None,
    actor: Actor = None,
    override: Annotated[
        bool, typer.Option("--override", help="Although its gate did not pass; the log says so.")
    ] = False,
) -> None:
    """Let a version serve a hospital from now on.

    \b
      locum assign phantom.at-dune@1 --reason 'better on twenty masks'
      locum assign phantom@2 --hospital aster --reason 'read its report'
    """
    from locum.commands.deciding import assign as run

    run(version, hospital, model, reason, actor, override)


@app.command(rich_help_panel=_DECIDE)
def rollback(
    model: Annotated[str, typer.Option("--model", "-m", help="The model's name.")],
    hospital: Named,
    reason: Reason,
    actor: Actor = None,
) -> None:
    """Return to what served before.

    \b
      locum rollback --model phantom --hospital dune --reason 'misses small lesions'
    """
    from locum.commands.deciding import roll_back

    roll_back(hospital, model, reason, actor)


@app.command(rich_help_panel=_DECIDE)
def history(
    model: Annotated[str, typer.Option("--model", "-m", help="The model's name.")], hospital: Named
) -> None:
    """Show which version served when, and who decided.

    \b
      locum history --model phantom --hospital dune
    """
    from locum.commands.deciding import history as run

    run(hospital, model)


WatchedModel = Annotated[str, typer.Argument(help="The model's name.")]
Watched = Annotated[str, typer.Argument(help="The hospital's id.")]
changing = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]}, rich_markup_mode="rich")
app.add_typer(changing, name="change-plan", rich_help_panel=_DECIDE)


@changing.callback()
def change_plan() -> None:
    """Say which changes one approver may assign; outside that two sign, each with a reason.

    \b
      locum change-plan show dune phantom
      locum change-plan write dune phantom change-plan.yaml --reason 'agreed on 3 May'
      locum change-plan end dune phantom --reason 'replaced by the hospital\'s own rules'
    """


@changing.command("show")
def show_change_plan(hospital: Watched, model: WatchedModel, as_json: AsJson = False) -> None:
    """Show the change plan, and what waits for a second signature."""
    from locum.commands.planning import show

    show(hospital, model, as_json)


@changing.command("write")
def write_change_plan(
    hospital: Watched,
    model: WatchedModel,
    file: Annotated[Path, typer.Argument(help="The plan, as YAML or JSON.")],
    reason: Reason,
    actor: Actor = None,
) -> None:
    """Write the change plan, in force from now on.

    \b
      recipes: [auto, masks]     # presets of jobs; federation: a version that no job here made
      masks: 8                   # masks of the hospital that judged it, at least
      at_least: -0.005           # lower bound of the change of Dice on them
      every_days: 14             # days between two decisions
      impact: no treatment depends on the mask; a radiologist looks at each
    """
    from locum.commands.planning import write

    write(hospital, model, file, reason, actor)


@changing.command("end")
def end_change_plan(hospital: Watched, model: WatchedModel, reason: Reason, actor: Actor = None) -> None:
    """End the change plan: an assignment needs one approver again."""
    from locum.commands.planning import write

    write(hospital, model, None, reason, actor)


shadowing = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]}, rich_markup_mode="rich")
app.add_typer(shadowing, name="shadow", rich_help_panel=_DECIDE)


@shadowing.callback()
def shadow() -> None:
    """Let a second version answer unseen, and see how both compare.

    \b
      locum shadow begin dune phantom 2 --every 10 --reason 'trained on four sites more'
      locum shadow show dune phantom
      locum shadow end dune phantom --reason 'no better'
    """


@shadowing.command("show")
def show_shadow(hospital: Watched, model: WatchedModel, as_json: AsJson = False) -> None:
    """Show how the versions that answered unseen compare with those that served."""
    from locum.commands.shadowing import show

    show(hospital, model, as_json)


@shadowing.command("begin")
def begin_shadow(
    hospital: Watched,
    model: WatchedModel,
    version: Annotated[str, typer.Argument(help="Its number, or name@number of an adapted version.")],
    reason: Reason,
    every: Annotated[int, typer.Option(min=1, max=10000, help="It answers one scan in so many.")] = 10,
    corrections: Annotated[
        int | None,
        typer.Option(min=10, max=10000, help="Assign it after so many corrected answers."),
    ] = None,
    gain: Annotated[
        float, typer.Option(min=-1, max=1, help="The lower bound of the gain of Dice must be above this.")
    ] = 0.0,
    actor: Actor = None,
) -> None:
    """Let a version answer some scans unseen. What is served stays as it is.

    \b
      locum shadow begin dune phantom phantom.at-dune@2 --reason 'adapted to the new scanner'
      locum shadow begin dune phantom 2 --corrections 20 --reason 'agreed on 3 May'
    """
    from locum.commands.shadowing import begin

    begin(hospital, model, version, every, corrections, gain, reason, actor)


@shadowing.command("end")
def end_shadow(hospital: Watched, model: WatchedModel, reason: Reason, actor: Actor = None) -> None:
    """End the shadow. What it found stays."""
    from locum.commands.shadowing import end

    end(hospital, model, reason, actor)


watching = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]}, rich_markup_mode="rich")
app.add_typer(watching, name="watch", rich_help_panel=_WATCH)

OfModel = Annotated[str | None, typer.Option("--model", "-m", help="Only answers of this model.")]


@watching.callback(invoke_without_command=True)
def watch(context: typer.Context, hospital: Hospital = None, as_json: AsJson = False) -> None:
    """Show what changed in a hospital's answers, since when, and what the watch costs.

    It ends with 1 where an alarm waits for a person, else with 0: cron can run it.

    \b
      locum watch
      locum watch --hospital dune --json
      locum watch answer dune phantom --scanner 'CT 2' --reason 'new tube, masks look right'
      locum watch set dune phantom --months 6 --stop hold --reason 'agreed on 3 May'
    """
    if context.invoked_subcommand is None:
        from locum.commands.watching import show_watches

        raise typer.Exit(show_watches(hospital, as_json))


@watching.command("answer")
def answer_alarms(
    hospital: Watched,
    model: WatchedModel,
    reason: Reason,
    scanner: Annotated[
        str | None, typer.Option(help="Its alarms; left out, those of scans without a known scanner.")
    ] = None,
    actor: Actor = None,
) -> None:
    """Answer the alarms of a scanner: the next answers say what is usual.

    \b
      locum watch answer dune phantom --scanner 'CT 2' --reason 'new tube, masks look right'
    """
    from locum.commands.watching import answer

    answer(hospital, model, scanner, reason, actor)


@watching.command("set")
def set_rule(
    hospital: Watched,
    model: WatchedModel,
    reason: Reason,
    months: Annotated[
        float, typer.Option(min=0.5, max=120, help="Months between false alarms, all scanners together.")
    ] = 12,
    stop: Annotated[
        str,
        typer.Option(
            help="At an alarm: warn in every answer, let the global model answer (global), or give no "
            "answer (hold)."
        ),
    ] = "warn",
    actor: Actor = None,
) -> None:
    """Set how often false alarms may be, and what happens to answers at an alarm.

    \b
      locum watch set dune phantom --months 6 --stop hold --reason 'agreed on 3 May'
    """
    from locum.commands.watching import set_rule as run

    run(hospital, model, months, stop, reason, actor)


@app.command(rich_help_panel=_WATCH)
def review(
    hospital: Named,
    model: OfModel = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="Answers that are shown.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Show which masks to look at: the newest answers, those that were least sure first.

    The newest 500 answers of the version that serves are ranked by their least sure label: "less sure" is the
    share of the others that was less sure of it. There must be 20 of them. Those that somebody looked at come
    last.

    \b
      locum review --hospital dune --limit 10
    """
    from locum.commands.watching import show_review

    raise typer.Exit(show_review(hospital, model, limit, as_json))


@app.command(rich_help_panel=_WATCH)
def correct(
    scans: Annotated[
        list[str] | None, typer.Argument(help="Files, folders, globs: the scans as they were segmented.")
    ] = None,
    masks: Annotated[
        Path | None, typer.Option(help="Folder of `locum segment` with the masks as they should be.")
    ] = None,
    hospital: Hospital = None,
    request: Annotated[str | None, typer.Option(help="Id of the answered request, of one scan.")] = None,
    accept: Annotated[bool, typer.Option("--accept", help="The answer of --request is right.")] = False,
    note: Annotated[str | None, typer.Option(help="A note; it must not name a patient.")] = None,
) -> None:
    """Send masks that a person corrected: they are kept at the hospital, and compared with the answers.

    A mask is named as its scan, or NAME-mask. NAME-report.json beside it says which answer it is of. A mask
    without a change counts as accepted, so name only scans that somebody looked at.

    \b
      locum segment scans/ -m phantom -H dune -o masks
      locum correct scans/case7.nii.gz --masks masks
      locum correct -H dune --request 883c0f09-… --accept
    """
    from locum.commands.correcting import accept_answer, correct_all

    if accept:
        if not request or not hospital or scans or masks:
            raise typer.BadParameter("--accept needs --request and --hospital, and takes no scans or masks")
        accept_answer(hospital, request, note)
        return
    if not scans or masks is None:
        raise typer.BadParameter("expected scans and --masks FOLDER; or --accept with --request")
    raise typer.Exit(correct_all(scans, masks, hospital, request, note))


auditing = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)
app.add_typer(auditing, name="audit", rich_help_panel=_DECIDE)


@auditing.callback()
def audit() -> None:
    """Say which version answered, by which decision; `locum serve audit` verifies the trail itself.

    \b
      locum audit answer --hospital dune --series 1.2.840.1 --day 2026-11-30
    """


@auditing.command("answer")
def audit_answer(
    hospital: Named,
    series: Annotated[str | None, typer.Option(help="SeriesInstanceUID of the scan.")] = None,
    request: Annotated[str | None, typer.Option(help="Id of the answered request.")] = None,
    scan: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="The file that was sent; it stays here.")
    ] = None,
    day: Annotated[
        datetime | None, typer.Option(formats=["%Y-%m-%d"], help="Only answers of this day, in UTC.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say which version answered, by which decision, and on what evidence. Ends with 1 without an answer.

    \b
      locum audit answer --hospital dune --series 1.2.840.1 --day 2026-11-30
      locum audit answer --hospital dune --request 883c0f09-…
      locum audit answer --hospital dune --scan case7.nii.gz --json
    """
    from locum.commands.auditing import show_answers

    if [series, request, scan].count(None) != 2:
        raise typer.BadParameter("expected one of --series, --request and --scan")
    on = None if day is None else day.date()
    raise typer.Exit(show_answers(hospital, series, request, scan, on, as_json))


@app.command(rich_help_panel=_DECIDE)
def card(
    version: Annotated[str, typer.Argument(help="The version, such as phantom@2.")],
    hospital: Annotated[
        str | None, typer.Option("--hospital", "-H", help="Only what is recorded at this hospital.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the two files.")] = Path(),
) -> None:
    """Save a version's card as one HTML page and JSON: training data, acceptance, monitoring, changes.

    \b
      locum card phantom@2 --hospital dune
    """
    from locum.commands.auditing import save_card

    name, _, number = version.rpartition("@")
    if not name or not number.isdigit():
        raise typer.BadParameter(f"expected a version such as phantom@2, found {version}")
    save_card(name, int(number), hospital, out)


@app.command(rich_help_panel=_DECIDE)
def report(
    hospital: Named,
    first: Annotated[datetime, typer.Option("--from", formats=["%Y-%m-%d"], help="The first day, in UTC.")],
    last: Annotated[datetime, typer.Option("--to", formats=["%Y-%m-%d"], help="The last day.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the two files.")] = Path(),
) -> None:
    """Save a hospital's period as one HTML page and JSON: versions, arrivals, alarms, corrections, decisions.

    \b
      locum report --hospital dune --from 2026-11-01 --to 2026-11-30
    """
    from locum.commands.auditing import save_report

    save_report(hospital, first.date(), last.date(), out)


@app.command(rich_help_panel=_WATCH)
def corrections(
    hospital: Named,
    model: OfModel = None,
    limit: Annotated[int, typer.Option(min=1, max=10000, help="Corrections that are shown.")] = 100,
    as_json: AsJson = False,
    may_train: Annotated[
        bool | None,
        typer.Option("--may-train/--may-not-train", help="Whether a model may learn from them."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Save scans and masks, to train a federation.")
    ] = None,
    pacs: Annotated[
        str | None, typer.Option(help="Find masks of this PACS that a person edited; with --query.")
    ] = None,
    query: Annotated[
        list[str] | None,
        typer.Option(help="With --pacs: a DICOM attribute, such as StudyDate=20261101-20261130; repeats."),
    ] = None,
    follow: Follow = False,
    keep_answers: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=3650,
            metavar="DAYS",
            help="Keep answered masks for so long, so that corrections need no scan; 0: none. With --reason.",
        ),
    ] = None,
    reason: Annotated[str | None, typer.Option(help="Why; with --keep-answers.")] = None,
    actor: Actor = None,
) -> None:
    """Show what people changed of a hospital's answers, by label, the newest first.

    Bad masks are corrected more often than good ones: these are not the figures of all answers.

    \b
      locum corrections --hospital dune
      locum corrections --hospital dune --json
      locum corrections --hospital dune --may-train
      locum corrections --hospital dune --model phantom --out data/dune
      locum corrections --hospital dune --pacs main --query StudyDate=20261101-20261130 --follow
      locum corrections --hospital dune --keep-answers 30 --reason 'our workstation sends no scans'
    """
    from locum.commands.correcting import (
        find_edited,
        keep_answers_for,
        save_corrections,
        set_consent,
        show_corrections,
    )

    if keep_answers is not None:
        if not reason:
            raise typer.BadParameter("--keep-answers needs --reason, which the audit trail keeps")
        keep_answers_for(hospital, keep_answers, reason, actor)
        return
    if pacs is not None:
        raise typer.Exit(find_edited(hospital, pacs, query or [], follow))
    if may_train is not None:
        set_consent(hospital, model, may_train)
    elif out is not None:
        if model is None:
            raise typer.BadParameter("--out needs --model: one folder has one task")
        raise typer.Exit(save_corrections(hospital, model, out))
    else:
        raise typer.Exit(show_corrections(hospital, model, limit, as_json))


@app.command("follow-up", rich_help_panel=_SCANS)
def follow_up(
    pacs: Annotated[str, typer.Argument(help="Name of the PACS in the service's settings.")],
    study: Annotated[str, typer.Argument(help="Study Instance UID of the newest study.")],
    series: Annotated[str, typer.Argument(help="Series Instance UID there.")],
    hospital: Named,
    model: Model = None,
    earlier: Annotated[
        list[str] | None,
        typer.Option(
            help="An earlier series, as STUDY/SERIES; repeats. By default those with a SEG or SR there.",
        ),
    ] = None,
    repeats: Annotated[
        str | None,
        typer.Option(help="A cohort with repeated scans of patients: which change is more than the spread."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File for the JSON, too.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare a series of a PACS with the patient's earlier ones: every one is read by one version.

    Figures of other versions in the PACS are shown with a warning, and never compared.

    \b
      locum follow-up main 1.2.840… 1.2.840… --hospital north --model liver
      locum follow-up main 1.2.840… 1.2.840… -H north -m liver@3 --repeats 5c0e… --json
    """
    from locum.commands.follow_up import follow_up as run

    raise typer.Exit(run(pacs, (study, series), hospital, model, earlier, repeats, out, as_json))


@app.command(rich_help_panel=_WATCH)
def observations(
    hospital: Named,
    out: Annotated[Path, typer.Option("--out", "-o", help="File for the table (CSV).")],
    model: OfModel = None,
) -> None:
    """Save what was observed of a hospital's answers: a row per answer and label, with no pixel and no name.

    \b
      locum observations --hospital dune --out observations.csv
    """
    from locum.commands.watching import save_observations

    save_observations(hospital, model, out)


@app.command(rich_help_panel=_SETTINGS)
def login(
    url: Annotated[str | None, typer.Argument(help="The service's address.")] = None,
    forget: Annotated[bool, typer.Option("--forget", help="Delete what is kept.")] = False,
) -> None:
    """Keep the address of a service and the key for it, in a file of mode 0600.

    The key is read from LOCUM_KEY, from a pipe, or from the keyboard, never from the command line.

    \b
      locum login https://locum.hospital.example
      locum login https://locum.hospital.example < key-file
    """
    from locum.commands.deciding import login as run

    run(url, forget)


def _given(**options: str | None) -> dict[str, str]:
    return {name: value for name, value in options.items() if value is not None}


def main() -> None:
    """Run the command line; an error is a sentence and an exit code, never a traceback."""
    try:
        app(prog_name="locum")
    except (LocumError, OSError) as error:
        from locum.commands.terminal import plain

        typer.echo(f"locum: {plain(in_words(error))}", err=True)
        raise SystemExit(exit_code(error)) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


def in_words(error: LocumError | OSError) -> str:
    """The error's sentence, with a command in place of the request that the service asks for."""
    import re

    if isinstance(error, OSError):
        place = "" if error.filename is None else f"{error.filename}: "
        return f"{place}{error.strerror or error}"
    if isinstance(error, NotAllowed) and error.slug == "credential-missing":
        # The service's own sentence names the header.
        return (
            "expected an API key or access token that the service takes: set LOCUM_KEY, or use `locum login`"
        )
    from locum.commands.terminal import in_flags

    said = in_flags(str(error))
    return re.sub(r"\bPUT /hospitals/(\S+) registers it", r"`locum register \1` registers it", said)


def exit_code(error: LocumError | OSError) -> int:
    """The exit code for an error."""
    from locum.errors import ScanInvalid, SettingInvalid

    if isinstance(error, NotAllowed):
        return NOT_ALLOWED
    if isinstance(error, Unreachable):
        return UNREACHABLE
    return USAGE if isinstance(error, ScanInvalid | SettingInvalid | _Missing) else FAILED
