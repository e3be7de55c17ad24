"""Segment or classify many scans: find them, send some at a time, and resume after an interruption.

A scan that a job segments has NAME-job.json until its mask is there: the same command goes on with the job.
"""

from __future__ import annotations

import glob
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from locum.answers import Classification, Job, Model, Report, Segmentation, write_whole
from locum.client import Client
from locum.commands.exit_codes import DONE, FAILED, INTERRUPTED
from locum.commands.terminal import Terminal, in_flags, plain, table
from locum.errors import AnswerInvalid, JobFailed, LocumError, NotAllowed, Problem, ScanInvalid, Unreachable
from locum.reading import read
from locum.scans import Scan, opened, series_files, split_name

T = TypeVar("T")

TABLE = "volumes.csv"
_SUFFIXES = (
    *(".nii.gz", ".nii", ".seg.nrrd", ".nrrd", ".mha", ".hdr", ".hdr.gz"),
    *(".png", ".tif", ".tiff", ".dcm", ".zip"),
)
_ALSO = {
    "overlay": "-overlay.png",
    "dicom-seg": "-seg.dcm",
    "dicom-sr": "-report.dcm",
    "dicom-rtstruct": "-rtstruct.dcm",
    "nrrd": "-mask.nrrd",
}
# Rejections of one scan; every other one would meet all that follow.
_OF_THE_SCAN = (400, 413, 415, 422)


@dataclass(frozen=True)
class Found:
    """A scan: its path, and its name relative to what the command named.

    `channels` are the files of a scan of several, by the names of the channels; `path` is then the first one.
    `wrong` says why it is none.
    """

    path: Path
    name: str
    channels: tuple[tuple[str, Path], ...] = ()
    wrong: str = ""

    @property
    def scan(self) -> Scan:
        """What is sent. Raises ScanInvalid."""
        if self.wrong:
            raise ScanInvalid(self.wrong)
        return dict(self.channels) if self.channels else self.path

    @property
    def stem(self) -> str:
        """The name without the suffix of its format."""
        lower = self.name.lower()
        return next((self.name[: -len(s)] for s in _SUFFIXES if lower.endswith(s)), self.name)


def find(paths: Iterable[str], without: Path | None = None) -> list[Found]:
    """Find the scans that paths, folders and globs name, each once, sorted within each of them.

    A folder with DICOM files is one series; other files count by their suffix. What is hidden, and the folder
    `without`, is left out.

    Raises:
        ScanInvalid: a path names no scan, or two scans would have one name.
    """
    found: dict[Path, Found] = {}
    for given in paths:
        matches = [given] if Path(given).exists() else sorted(glob.glob(given, recursive=True))  # noqa: PTH207
        if not matches:
            raise ScanInvalid(f"{given}: expected a file, a folder or a glob that matches some, found none")
        scans = [scan for match in matches for scan in _below(Path(match), without)]
        if not scans:
            raise ScanInvalid(
                f"{given}: expected scans ({', '.join(_SUFFIXES)}) or folders of DICOM, found none"
            )
        for scan in scans:
            found.setdefault(scan.path.resolve(), scan)
    names: dict[str, Found] = {}
    for scan in found.values():
        if (other := names.setdefault(scan.stem, scan)) is not scan:
            raise ScanInvalid(
                f"{scan.path} and {other.path}: both results would be called {scan.stem}; name their common "
                "folder instead"
            )
    return list(found.values())


def _below(path: Path, without: Path | None) -> list[Found]:
    if path.is_file():
        return [Found(path, path.name)]
    scans = []
    for folder in sorted([path, *(each for each in path.rglob("*") if each.is_dir())]):
        inside = folder.relative_to(path)
        if any(part.startswith(".") for part in inside.parts) or (
            without is not None and folder.resolve().is_relative_to(without.resolve())
        ):
            continue
        series = set(series_files(folder))
        if series:
            scans.append(Found(folder, str(inside) if inside.parts else path.resolve().name))
        files = [file for file in sorted(folder.iterdir()) if file.is_file() and file not in series]
        scans += [
            Found(file, str(inside / file.name))
            for file in files
            if file.name.lower().endswith(_SUFFIXES) and not file.name.startswith(".")
        ]
    return scans


def group(scans: Sequence[Found], channels: Sequence[str]) -> list[Found]:
    """Make one scan of the files of a case, for a model with these channels; without any, leave all as it is.

    A file, or the folder of a DICOM series, is named by its channel (`case7_T1`, `case7/T1`) or by nnU-Net's
    number (`case7_0000`). What has no channel in its name is a scan of its own, such as a zip of channels.
    """
    if not channels:
        return list(scans)
    cases: dict[str, dict[int, Found]] = {}
    found: list[Found | str] = []
    for scan in scans:
        folder, _, last = scan.stem.rpartition("/")
        named = split_name(last, channels)
        if named is None:
            found.append(scan)
            continue
        case = "/".join(part for part in (folder, named[0]) if part) or scan.path.resolve().parent.name
        if case not in cases:
            found.append(case)
        if (other := cases.setdefault(case, {}).setdefault(named[1], scan)) is not scan:
            raise ScanInvalid(
                f"{scan.path} and {other.path}: both are channel {channels[named[1]]} of {case}; leave one "
                "out"
            )
    return [_case(each, cases[each], channels) if isinstance(each, str) else each for each in found]


def _case(name: str, files: Mapping[int, Found], channels: Sequence[str]) -> Found:
    given = [(channels[index], files[index].path) for index in sorted(files)]
    missing = [channel for index, channel in enumerate(channels) if index not in files]
    wrong = (
        f"expected the channels {', '.join(channels)}, found {', '.join(path.name for _, path in given)}: "
        f"{', '.join(missing)} is missing"
        if missing
        else ""
    )
    return Found(given[0][1], name, tuple(given), wrong)


def one_of_channels(given: Sequence[str]) -> Found:
    """The scan that `--channel NAME=FILE` options name. Raises ScanInvalid."""
    channels: dict[str, Path] = {}
    for each in given:
        name, found, file = each.partition("=")
        if not found or not name or not file or name in channels:
            raise ScanInvalid(f"--channel {each}: expected NAME=FILE, each name once, such as T1=t1.nii.gz")
        channels[name] = Path(file)
    named = [split_name(Found(path, path.name).stem, list(channels)) for path in channels.values()]
    cases = {None if each is None else each[0] for each in named}
    first = next(iter(channels.values()))
    shared = cases.pop() if len(cases) == 1 else None
    return Found(first, shared or first.resolve().parent.name, tuple(channels.items()))


def described(client: Client, model: str | None) -> Model | None:
    """A model as the service lists it, the only one where none is named; None of an unknown one."""
    if model is None:
        offered = [each for each in client.models() if each.hospital is None]
        return offered[0] if len(offered) == 1 else None
    try:
        return client.model(model.partition("@")[0])
    except Problem:
        # The request that names it says what is wrong.
        return None


def channels_of(model: Model | None) -> tuple[str, ...]:
    """The channels of a model that are files of their own."""
    return () if model is None else model.channel_names


@dataclass
class _Done(Generic[T]):
    scan: Found
    answer: T | None = None
    error: str = ""
    kept: bool = False
    outdated: bool = False


def segment_all(
    paths: Sequence[str],
    channels: Sequence[str],
    out: Path,
    asked: Mapping[str, Any],
    also: str | None,
    jobs: int,
    again: bool,
) -> int:
    """Segment the scans into a folder; return the exit code. `channels` are NAME=FILE, of one scan.

    Each gets NAME-mask, NAME-report.json and, with `also`, a second file; the table has a row per label of
    each. A scan is left as it is where its mask is there and its report says that it was made of these bytes
    by these options.

    Raises:
        ScanInvalid, SettingInvalid, Unreachable, NotAllowed, Problem: nothing can be segmented.
    """
    if also is not None and also not in _ALSO:
        raise ScanInvalid(f"--also {also}: expected one of {', '.join(_ALSO)}")
    if bool(paths) == bool(channels):
        raise ScanInvalid("expected scans, or --channel NAME=FILE for each channel of one scan")
    scans = find(paths, out) if paths else [one_of_channels(channels)]
    with Client() as client:
        model = described(client, asked.get("model"))
        if paths:
            scans = group(scans, channels_of(model))
        serves = _serving(client, model, asked)

        def answer(scan: Found, display: _Display) -> _Done[Report]:
            kept = None if again else _kept(scan, out, asked, also)
            if kept is not None:
                return _Done(scan, kept, kept=True, outdated=_outdated(kept, serves))
            pending = _Pending(scan, out, asked)
            follow = display.follow(scan)

            def note(job: Job) -> None:
                pending.note(job)
                follow(job)

            made: Segmentation = client.segment(scan.scan, follow=note, resume=pending.job, **asked)
            made.save(out / f"{scan.stem}-mask{made.suffix}")
            lacks = ""
            if also is not None:
                try:
                    file = client.render(scan.scan, also, follow=follow, **asked)
                    write_whole(out / f"{scan.stem}{_ALSO[also]}", file.content)
                except Problem as problem:
                    # The mask is there all the same.
                    if problem.status not in _OF_THE_SCAN:
                        raise
                    lacks = f"no {also}: {in_flags(str(problem))}"
            # Last: a report says that the mask is whole.
            report = json.dumps(made.report.raw, indent=2, ensure_ascii=False)
            write_whole(_report(scan, out), report.encode())
            pending.end()
            return _Done(scan, made.report, error=lacks)

        done, complete = _each(scans, answer, jobs, _volumes)
    rows = [row for each in done for row in _rows(each, out)]
    write_whole(out / TABLE, table(_COLUMNS, rows))
    Terminal(soft_wrap=True, highlight=False, markup=False).print(
        _summary(done, scans, complete, str(out / TABLE))
    )
    if outdated := [each for each in done if each.outdated]:
        by = ", ".join(sorted({each.answer.receipt.model.name for each in outdated if each.answer}))
        whom = f" {asked['hospital']}" if "hospital" in asked else ""
        Terminal(soft_wrap=True, highlight=False, markup=False).print(
            f"{len(outdated)} of these masks {'is' if len(outdated) == 1 else 'are'} of {by}, which does not "
            f"serve{whom} any more: --again sends their scans again"
        )
    return _code(done, complete)


def _serving(client: Client, model: Model | None, asked: Mapping[str, Any]) -> str | None:
    """The digest of the version that answers what names none; None where the request chooses one itself."""
    if model is None or "@" in (asked.get("model") or "") or model.hospital is not None:
        return None
    if asked.get("hospital") is None:
        return None if model.latest is None else model.latest.digest
    if asked.get("personalization", "auto") != "auto":
        return None
    try:
        return client.serving(asked["hospital"], model.name).digest
    except Problem:
        # The request that names the hospital says what is wrong.
        return None


def _outdated(report: Report, serves: str | None) -> bool:
    return serves is not None and report.receipt.model.digest != serves


def classify_all(paths: Sequence[str], out: Path | None, asked: Mapping[str, Any], jobs: int) -> int:
    """Classify the scans, with a table in the file `out`; return the exit code. Raises as `segment_all`."""
    scans = find(paths)
    with Client() as client:
        done, complete = _each(
            scans, lambda scan, _: _Done(scan, client.classify(scan.path, **asked)), jobs, _class
        )
    if out is not None:
        classes = sorted({name for each in done if each.answer for name in each.answer.probabilities})
        columns = [
            "scan",
            "predicted",
            *classes,
            "entropy",
            "warnings",
            "error",
            "model",
            "network",
            "request",
        ]
        write_whole(out, table(columns, [_class_row(each) for each in done]))
    Terminal(soft_wrap=True, highlight=False, markup=False).print(
        _summary(done, scans, complete, "" if out is None else str(out))
    )
    return _code(done, complete)


class _Stopped(Exception):
    """The command was interrupted while it followed a job, which goes on."""


class _Display:
    """A bar for all scans, and one for each that a job segments; lines elsewhere than at a terminal.

    `stopped` ends the following of jobs.
    """

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.console = Terminal(highlight=False, soft_wrap=True)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )

    def follow(self, scan: Found) -> Callable[[Job], None]:
        """Show how the job of a scan goes."""
        name = escape(plain(scan.name))
        tasks: list[TaskID] = []
        told: list[str] = []

        def show(job: Job) -> None:
            if self.stopped.is_set():
                raise _Stopped
            window, windows = job.progress.get("window"), job.progress.get("windows")
            if not tasks:
                tasks.append(self.bar.add_task(name, total=None))
            if isinstance(window, int) and isinstance(windows, int):
                self.bar.update(tasks[0], total=windows, completed=window)
            if job.ended:
                self.bar.remove_task(tasks.pop())
            words = job.no_worker or (f"{windows} windows" if windows else "takes long, and became a job")
            if words not in told:
                told.append(words)
                self.console.print(f"[dim]… {name}  {escape(words)} (job {job.id})[/]")

        return show


@dataclass
class _Pending:
    """The job of a scan that an interrupted command left, in NAME-job.json."""

    scan: Found
    out: Path
    asked: Mapping[str, Any]
    job: str | None = None
    _sha256: str = field(init=False)

    def __post_init__(self) -> None:
        with opened(self.scan.scan) as upload:
            self._sha256 = upload.sha256
        try:
            found = json.loads(self._path.read_bytes())
            if found["sha256"] == self._sha256 and found["asked"] == dict(self.asked):
                self.job = str(found["job"])
        except (OSError, ValueError, KeyError, TypeError):
            self.job = None

    @property
    def _path(self) -> Path:
        return self.out / f"{self.scan.stem}-job.json"

    def note(self, job: Job) -> None:
        """Keep the job's id, from its first state on."""
        if job.ended and job.state not in ("succeeded", "fell_back"):
            self.end()
        elif job.id != self.job or not self._path.is_file():
            self.job = job.id
            content = {"job": job.id, "sha256": self._sha256, "asked": dict(self.asked)}
            write_whole(self._path, json.dumps(content).encode())

    def end(self) -> None:
        """Forget the job."""
        self._path.unlink(missing_ok=True)


def _each(
    scans: Sequence[Found],
    answer: Callable[[Found, _Display], _Done[T]],
    jobs: int,
    line: Callable[[_Done[T]], str],
) -> tuple[list[_Done[T]], bool]:
    """Answer scans, some at a time, with a line for each and a bar at a terminal.

    Returns those that were answered or rejected, in the order of `scans`, and whether these are all: Ctrl-C
    leaves the others.
    """
    display = _Display()
    console, bar = display.console, display.bar
    done: dict[Found, _Done[T]] = {}
    complete = True

    def one(scan: Found) -> _Done[T]:
        try:
            return answer(scan, display)
        except (Unreachable, NotAllowed):
            raise
        except Problem as problem:
            if problem.status not in _OF_THE_SCAN:
                raise
            return _Done(scan, error=in_flags(str(problem)))
        except (ScanInvalid, JobFailed, AnswerInvalid) as error:
            return _Done(scan, error=str(error))

    pool = ThreadPoolExecutor(jobs)
    waiting: dict[Future[_Done[T]], Found] = {}
    rest = iter(scans)
    with bar:
        task = bar.add_task("scans", total=len(scans))
        try:
            while True:
                # Not all at once: a folder may have very many.
                while len(waiting) < 2 * jobs and (scan := next(rest, None)) is not None:
                    waiting[pool.submit(one, scan)] = scan
                if not waiting:
                    break
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    scan = waiting.pop(future)
                    done[scan] = future.result()
                    console.print(line(done[scan]))
                    bar.advance(task)
        except KeyboardInterrupt:
            complete = False
            display.stopped.set()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return [done[scan] for scan in scans if scan in done], complete


def _report(scan: Found, out: Path) -> Path:
    return out / f"{scan.stem}-report.json"


def _mask(scan: Found, out: Path) -> Path | None:
    """The mask that is there."""
    paths = (out / f"{scan.stem}-mask{suffix}" for suffix in (".nii.gz", ".png"))
    return next((path for path in paths if path.is_file()), None)


def _kept(scan: Found, out: Path, asked: Mapping[str, Any], also: str | None) -> Report | None:
    """The report of an earlier command that was asked for the same of the same bytes."""
    try:
        found = json.loads(_report(scan, out).read_bytes())
        report = read(Report, found)
    except (OSError, ValueError, LocumError):
        return None
    if _mask(scan, out) is None or (also and not (out / f"{scan.stem}{_ALSO[also]}").is_file()):
        return None
    defaults = {
        **dict.fromkeys(("model", "hospital", "site", "series")),
        **{"personalization": "auto", "guard": "auto"},
    }
    options = report.receipt.options
    if any(options.get(name, default) != asked.get(name, default) for name, default in defaults.items()):
        return None
    with opened(scan.scan) as upload:
        return report if upload.sha256 == _prefixed(report.receipt.input_sha256) else None


def _prefixed(digest: str) -> str:
    return digest if digest.startswith("sha256:") else f"sha256:{digest}"


def _volumes(done: _Done[Report]) -> str:
    """The line of a scan."""
    report = done.answer
    if report is None:
        return _rejected(done)
    sizes = [
        f"{label} {each.voxels} px" if each.volume_ml is None else f"{label} {each.volume_ml:.2f} mL"
        for label, each in report.labels.items()
    ]
    by = f"[dim]{escape(report.receipt.network.name)}[/]"
    said = [*report.warnings, *([done.error] if done.error else [])]
    kept = "  [dim]there already[/]" if done.kept else ""
    if done.outdated:
        kept += "  [yellow]by a version that no longer serves[/]"
    return f"{_named(done)}  {escape(', '.join(sizes))}  {by}{kept}{_warned(said)}"


def _class(done: _Done[Classification]) -> str:
    found = done.answer
    if found is None:
        return _rejected(done)
    sure = found.probabilities.get(found.predicted, 0.0)
    by = f"[dim]{escape(found.receipt.network.name)}[/]"
    return f"{_named(done)}  {escape(found.predicted)} {sure:.2f}  {by}{_warned(found.warnings)}"


def _named(done: _Done[Any]) -> str:
    return f"[green]✓[/] {escape(done.scan.name)}"


def _rejected(done: _Done[Any]) -> str:
    return f"[red]✗[/] {escape(done.scan.name)}  {escape(done.error)}"


def _warned(warnings: Sequence[str]) -> str:
    """One warning ends the scan's line; each of several has a line below it."""
    before = "  " if len(warnings) == 1 else "\n    "
    return "".join(f"{before}[yellow]warning:[/] {escape(each)}" for each in warnings)


_COLUMNS = (
    *("scan", "mask", "label", "voxels", "fraction", "volume_ml", "confidence", "review", "warnings"),
    *("error", "model", "network", "personalization", "site", "graph", "input_sha256", "request"),
)


def _rows(done: _Done[Report], out: Path) -> list[dict[str, Any]]:
    """The rows of a scan: one per label, or one with the reason why it has none."""
    report = done.answer
    if report is None:
        return [{"scan": done.scan.name, "error": done.error}]
    receipt, mask = report.receipt, _mask(done.scan, out)
    common = {
        "scan": done.scan.name,
        "mask": "" if mask is None else mask.relative_to(out).as_posix(),
        "warnings": "; ".join(report.warnings),
        "error": done.error,
        "model": receipt.model.name,
        "network": receipt.network.name,
        "personalization": receipt.personalization,
        "site": receipt.site,
        "graph": receipt.graph,
        "input_sha256": receipt.input_sha256,
        "request": receipt.request,
    }
    return [
        {
            **common,
            "label": name,
            "voxels": each.voxels,
            "fraction": each.fraction,
            "volume_ml": each.volume_ml,
            "confidence": each.confidence,
            "review": each.review,
        }
        for name, each in report.labels.items()
    ]


def _class_row(done: _Done[Classification]) -> dict[str, Any]:
    found = done.answer
    if found is None:
        return {"scan": done.scan.name, "error": done.error}
    return {
        "scan": done.scan.name,
        "predicted": found.predicted,
        **found.probabilities,
        "entropy": found.entropy,
        "warnings": "; ".join(found.warnings),
        "model": found.receipt.model.name,
        "network": found.receipt.network.name,
        "request": found.receipt.request,
    }


def _summary(done: Sequence[_Done[Any]], scans: Sequence[Found], complete: bool, table: str) -> str:
    rejected, kept = sum(not each.answer for each in done), sum(each.kept for each in done)
    parts = [f"{len(done) - rejected} of {len(scans)} scans"]
    parts += [f"{kept} of them there already"] if kept else []
    parts += [f"{rejected} rejected"] if rejected else []
    parts += [f"table: {table}"] if table else []
    parts += [] if complete else ["stopped; the same command goes on"]
    return "; ".join(parts)


def _code(done: Sequence[_Done[Any]], complete: bool) -> int:
    if not complete:
        return INTERRUPTED
    return FAILED if any(each.answer is None or each.error or each.outdated for each in done) else DONE
