"""A worker process: run the steps of its sites, and hold their data and memories.

Tasks and results are small and go over a pipe; tensors are stored in files of the exchange folder. A site's
memory and data never leave the worker.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from training.algorithm import Algorithm, Memory, Phase, State
from training.engine.client import RunEnvironment, run_step
from training.engine.device import device_of_worker
from training.engine.egress import SiteSpec
from training.engine.folder import FAILURES, SiteFolder, Slot
from training.engine.tensorfile import read_tensors, size_of, write_tensors
from training.errors import AlgorithmError, EgressRefused, SiteFailed, TrainingError
from training.privacy import Spent

# glibc's names and numbers (mallopt(3))
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_KEPT_BYTES = 2**30


def keep_freed_memory() -> None:
    """Keep up to a gigabyte of freed memory in this process, if the C library supports it (glibc does).

    By default freed memory soon returns to the system, which clears every page when it is allocated again.
    For a small network that is a tenth of the training time. Results do not depend on it.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        library.mallopt(_MMAP_THRESHOLD, _KEPT_BYTES)


@dataclass(frozen=True)
class Task:
    """One site's part of a round. With `step` None, the task only loads the site's data.

    `slot` holds the site's last accepted memory; a new one goes to the slot `to`. Each group is uploaded to
    the path `upload` with the group's name appended.
    """

    site: str
    step: int | None = None
    round: int = 0
    received: Mapping[str, Path] | None = None
    slot: Slot | None = None
    _: KW_ONLY
    to: Slot = "a"
    upload: Path | None = None


@dataclass(frozen=True)
class Delivery:
    """The uploads of a site as files, and the slot of its new memory.

    When a task only loads the site's data, `scored` is the most that a score can count, and `images` the
    number of training images, if the data says so.
    """

    site: str
    files: Mapping[str, Path]
    sent: Mapping[str, int]
    weight: float
    metrics: Mapping[str, float]
    withheld: tuple[str, ...]
    slot: Slot | None
    seconds: float
    privacy: Mapping[str, Spent] = field(default_factory=dict)
    scored: int | None = None
    images: int | None = None


@dataclass(frozen=True)
class Failure:
    """The reason why a site failed. It names no patient, since the server gets it, except if loading fails.

    `fatal`: the method is at fault, so repeating the round cannot help.
    """

    site: str
    reason: str
    fatal: bool = False


def serve(connection: Connection, work: bytes, number: int) -> None:
    """Run the main loop of worker `number`. Returns when the other end of the pipe closes.

    `work` is the pickled tuple of the algorithm, its sites, the run's environment and its folder.
    """
    # Ctrl-C reaches the whole process group; only the engine handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    keep_freed_memory()
    algorithm, sites, environment, root = pickle.loads(work)
    environment = replace(environment, device=device_of_worker(environment.device, number))
    environment.apply()
    worker = Worker(algorithm, sites, environment, root)
    try:
        while True:
            connection.send(worker.answer(connection.recv()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _die_with_parent() -> None:
    """Exit when the parent does: a step may take minutes and must not still run when the run is resumed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


class Worker:
    """The sites of one process: their data and memories, loaded when first needed.

    `account` is the file with a site's releases, if it is one for several runs.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        sites: Sequence[SiteSpec],
        environment: RunEnvironment,
        root: Path,
        account: Path | None = None,
    ) -> None:
        self._plan = algorithm.plan()
        self._sites = {site.name: site for site in sites}
        self._environment = environment
        self._root = root
        self._account = account
        self._data: dict[str, Any] = {}
        # The slot last written or read, with its memory, to avoid reading it again.
        self._memories: dict[str, tuple[Slot, Memory]] = {}
        # The last download of each group, which the next site of the round may share.
        self._downloads: dict[str, tuple[tuple[int, int, Path], State]] = {}

    def replace_site(self, site: SiteSpec) -> None:
        """Use another policy for a site from its next task on; its data stays loaded."""
        self._sites[site.name] = site

    def forget_downloads(self) -> None:
        """Read the downloads of the next task again: a repeated round may bring others."""
        self._downloads.clear()

    def answer(self, task: Task) -> Delivery | Failure:
        """Run a task. Every error becomes a Failure.

        Failures of a round reach the server and the report, so only the package's own messages are passed on.
        The text of any other error may name a patient's file, and stays in the site's own folder.
        """
        try:
            return self._do(task)
        except AlgorithmError as error:
            return Failure(task.site, str(error), fatal=True)
        except (SiteFailed, EgressRefused) as error:
            return Failure(task.site, str(error))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(where.filename).name}:{where.lineno}"
            if task.step is None:
                # Unreadable data, before the first round: the operator must know which file it is.
                own = isinstance(error, TrainingError)
                return Failure(task.site, str(error) if own else f"{type(error).__name__}: {error} ({place})")
            head = f"phase '{self._plan[task.step].name}', round {task.round + 1}"
            text = "".join(traceback.format_exception(error))
            SiteFolder(self._root, task.site).note_failure(f"{head}\n{text}")
            pointer = f"see sites/{task.site}/{FAILURES} in the run's folder"
            # The system's own words for its error, such as a full disk, name no file.
            why = f" ({os.strerror(error.errno)})" if isinstance(error, OSError) and error.errno else ""
            return Failure(task.site, f"{type(error).__name__}{why} at {place}; {pointer}")

    def _do(self, task: Task) -> Delivery:
        started = time.perf_counter()
        site = self._sites[task.site]
        if task.site not in self._data:
            self._data[task.site] = site.load()
        if task.step is None or task.upload is None:
            data, seconds = self._data[task.site], time.perf_counter() - started
            scored, images = getattr(data, "scored", None), getattr(data, "images", None)
            return Delivery(task.site, {}, {}, 0.0, {}, (), None, seconds, scored=scored, images=images)
        phase = self._plan[task.step]
        assert isinstance(phase, Phase)
        context = self._environment.context(phase.name, task.round, phase.rounds, task.site)
        received = {name: self._download(task, name, path) for name, path in (task.received or {}).items()}
        memory = self._recall(task)
        own = SiteFolder(self._root, task.site, self._account)
        outgoing, new = run_step(phase, context, site, received, memory, self._data[task.site], own)
        files = {name: task.upload.with_name(f"{task.upload.name}-{name}") for name in outgoing.uploads}
        for name, state in outgoing.uploads.items():
            write_tensors(files[name], state)
        slot = task.slot
        if new is not None:
            slot = task.to
            own.save(slot, new)
            self._memories[task.site] = (slot, new)
        sent = {name: size_of(state) for name, state in outgoing.uploads.items()}
        return Delivery(
            task.site,
            files,
            sent,
            outgoing.weight,
            outgoing.metrics,
            outgoing.withheld,
            slot,
            time.perf_counter() - started,
            outgoing.privacy,
        )

    def _download(self, task: Task, group: str, path: Path) -> State:
        assert task.step is not None
        # Every round overwrites the files of the previous one.
        wanted = (task.step, task.round, path)
        if group not in self._downloads or self._downloads[group][0] != wanted:
            self._downloads[group] = (wanted, read_tensors(path)[0])
        return dict(self._downloads[group][1])

    def _recall(self, task: Task) -> Memory:
        slot, memory = self._memories.get(task.site, (None, Memory()))
        if slot != task.slot:
            # The last memory of this process was not accepted, or another process wrote a newer one.
            memory = SiteFolder(self._root, task.site).load(task.slot)
            if task.slot is not None:
                self._memories[task.site] = (task.slot, memory)
        return memory
