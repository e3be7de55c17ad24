"""The folder of a run: checkpoints from which a run killed at any instant resumes with the same result.

RUN/run.json                 identity of the run: method, configuration, data, seed; final with a checkpoint
RUN/checkpoint.json          the last committed round, and those before it that can be taken back: where the
                             server's memory is, and each site's
RUN/history.jsonl            one line per committed round; bytes beyond the checkpoint's length are ignored
RUN/server-{a,b,..}.safetensors the server's memory
RUN/sites/SITE/memory-{a,b,..}.safetensors   the site's own memory; stays at the site
RUN/sites/SITE/failures.log  tracebacks of failed steps of the site; stays at the site
RUN/sites/SITE/key           secret from which the site's noise is drawn, if it adds any; stays at the site
RUN/sites/SITE/releases.json what left the site with noise, for its epsilon; stays at the site. A hospital's
                             own process has one file for all runs instead (`training.network.hospital`)
RUN/exchange/                tensors in transit between processes; emptied when the run ends or is stopped

A step writes its memory to a slot that no committed round in checkpoint.json refers to, so a file left
half-written by a crash is never read, also after rounds are taken back. Slots are two more than the rounds
that can be taken back. A round is committed by replacing checkpoint.json in one rename. At the end of the run
the server's memories that no committed round refers to are deleted.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from string import ascii_lowercase
from typing import Any, NamedTuple

from model_store.durable import naming, sync_folder, write_durably
from training.algorithm import Memory
from training.engine.limits import MOST_KEPT
from training.engine.tensorfile import read_tensors, write_tensors
from training.errors import RunMismatch, TrainingError

Slot = str
# The layout of memories (`training.parts.part.Slot`): a run that another layout began cannot go on.
MEMORIES = 2
FAILURES = "failures.log"
RELEASES = "releases.json"


@dataclass(frozen=True)
class RunCheckpoint:
    """Progress of a run: `step` indexes the plan, `round` is the next round within that step.

    `before` has the checkpoints of the rounds that can be taken back, the last one first, without theirs.
    """

    step: int
    round: int
    server_slot: Slot
    site_slots: Mapping[str, Slot] = field(default_factory=dict)
    history_bytes: int = 0
    before: tuple[RunCheckpoint, ...] = ()

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RunCheckpoint:
        """Build a checkpoint from the content of checkpoint.json."""
        return cls(**{**content, "before": tuple(cls(**each) for each in content.get("before", ()))})

    def to_json(self) -> dict[str, Any]:
        """The content of checkpoint.json."""
        return {"memories": MEMORIES, **asdict(self)}


def free_slot(checkpoint: RunCheckpoint | None, site: str | None = None) -> Slot:
    """Return a slot for the next memory of a site, or of the server: none that the checkpoint refers to."""
    used: set[Slot | None] = set()
    if checkpoint is not None:
        for each in (checkpoint, *checkpoint.before[:MOST_KEPT]):
            used.add(each.server_slot if site is None else each.site_slots.get(site))
    return next(slot for slot in ascii_lowercase if slot not in used)


@contextmanager
def locked(folder: Path, otherwise: str) -> Iterator[None]:
    """Lock a folder against other processes. Raises TrainingError, in these words, if another has the lock.

    The operating system releases the lock when the process ends, so a kill leaves no stale lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TrainingError(otherwise) from error
        yield


class Release(NamedTuple):
    """An update that left a site with noise (in clips): its group, and the name of its run."""

    group: str
    noise: float
    run: str


class SiteFolder:
    """The private folder of one site. Only processes that run the site's steps access it.

    `account` is the file with the site's releases, if it is one for several runs.
    """

    def __init__(self, root: Path, site: str, account: Path | None = None) -> None:
        self.run = root.name
        self._path = root / "sites" / site
        self._account = account or self._path / RELEASES

    def save(self, slot: Slot, memory: Memory) -> None:
        """Write the memory to a slot, which no committed round may refer to."""
        write_tensors(self._file(slot), memory.tensors, memory.facts, durable=True)

    def load(self, slot: Slot | None) -> Memory:
        """Read the memory in a slot. Without a slot (a new site) it is empty."""
        return Memory() if slot is None else Memory(*read_tensors(self._file(slot)))

    def key(self) -> bytes:
        """Return the site's secret random key, which is created on the first call."""
        path = self._path / "key"
        if not path.exists():
            self._path.mkdir(parents=True, exist_ok=True)
            write_durably(path, secrets.token_bytes(32), mode=0o600)
        return path.read_bytes()

    def releases(self) -> dict[str, Release]:
        """Return what left with noise, in every run of the account, by id: see `training.engine.release`."""
        if not self._account.exists():
            return {}
        lines = json.loads(self._account.read_text())
        return {line["id"]: Release(line["group"], line["noise"], line["run"]) for line in lines}

    def note_releases(self, releases: Mapping[str, Release]) -> None:
        """Replace the list of `releases`, durably."""
        lines = [{"id": id_, **release._asdict()} for id_, release in releases.items()]
        write_durably(self._account, json.dumps(lines).encode(), mode=0o600)

    def note_failure(self, text: str) -> None:
        """Append to the site's failure log. If it cannot be written, the text is lost."""
        with suppress(OSError):
            self._path.mkdir(parents=True, exist_ok=True)
            path = self._path / FAILURES
            path.touch(mode=0o600)
            # A file name in the text need not be valid UTF-8.
            with path.open("a", encoding="utf-8", errors="backslashreplace") as log:
                log.write(f"{text}\n")

    def _file(self, slot: Slot) -> Path:
        return self._path / f"memory-{slot}.safetensors"


class RunFolder:
    """The server's part of a run's folder."""

    def __init__(self, root: Path, kept: int = 1) -> None:
        """`kept` is how many committed rounds can be taken back, at most 24; each costs the disk a memory."""
        self.root = Path(root)
        self.exchange = self.root / "exchange"
        self.kept = kept

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder against other processes. Raises TrainingError when another holds the lock."""
        advice = f"{self.root} is in use by another process; wait for it, or use another folder"
        with locked(self.root, advice):
            yield

    def claim(self, identity: Mapping[str, Any], *, resume: bool) -> None:
        """Record the run's identity in the folder, or compare it with the identity recorded there.

        Before the first committed round the folder holds no run: data and policies may still change. Raises
        RunMismatch when it holds another run (naming the fields that differ), or holds the same run and
        `resume` is false.
        """
        path = self.root / "run.json"
        if self.checkpoint() is None or not path.exists():
            self.root.mkdir(parents=True, exist_ok=True)
            _replace(path, dict(identity))
            return
        if differences := differing(identity, json.loads(path.read_text())):
            raise RunMismatch(
                f"{self.root} holds another run; use another folder, or resume with the original settings",
                differences,
            )
        if not resume:
            raise RunMismatch(
                f"{self.root} holds this run already", ["resume it, or delete the folder to start again"]
            )

    def checkpoint(self) -> RunCheckpoint | None:
        """Read the checkpoint of the last committed round, or return None before the first.

        Raises RunMismatch where the memories that it names are of another layout.
        """
        path = self.root / "checkpoint.json"
        if not path.exists():
            return None
        content = json.loads(path.read_text())
        if (found := content.pop("memories", 1)) != MEMORIES:
            raise RunMismatch(
                f"{self.root} has memories of another version of this software",
                [
                    f"memories: expected layout {MEMORIES}, found {found}; resume the run with the version "
                    "that began it, or begin it again in another folder"
                ],
            )
        return RunCheckpoint.from_json(content)

    def server(self, slot: Slot) -> Memory:
        """Read the server's memory in a slot."""
        return Memory(*read_tensors(self._server_file(slot)))

    def history(self, checkpoint: RunCheckpoint) -> list[dict[str, Any]]:
        """Read the notes of the committed rounds."""
        content = (self.root / "history.jsonl").read_bytes()[: checkpoint.history_bytes]
        return [json.loads(line) for line in content.splitlines()]

    def commit(
        self,
        checkpoint: RunCheckpoint,
        server: Memory,
        note: Mapping[str, Any],
        previous: RunCheckpoint | None = None,
    ) -> RunCheckpoint:
        """Commit a round and return the new checkpoint. Atomic: a kill leaves the whole round or none of it.

        `checkpoint.history_bytes` is the length of the history before this round; `note` is appended to it.
        `previous` is the checkpoint that the round began from.
        """
        write_tensors(self._server_file(checkpoint.server_slot), server.tensors, server.facts, durable=True)
        line = json.dumps(note).encode() + b"\n"
        path = self.root / "history.jsonl"
        new = not path.exists()
        with naming(path), path.open("wb" if new else "r+b") as file:
            file.truncate(checkpoint.history_bytes)
            file.seek(checkpoint.history_bytes)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        if new:
            sync_folder(self.root)
        before = () if previous is None else (replace(previous, before=()), *previous.before)
        committed = replace(
            checkpoint, history_bytes=checkpoint.history_bytes + len(line), before=before[: self.kept]
        )
        _replace(self.root / "checkpoint.json", committed.to_json())
        return committed

    def empty_exchange(self) -> None:
        """Delete the exchanged tensors, so that no site's data is kept for longer than its run."""
        for path in self.exchange.glob("*"):
            path.unlink()

    def delete_unused(self, checkpoint: RunCheckpoint) -> None:
        """Delete the server's memories that neither the checkpoint nor those before it refer to.

        A method may have dropped from its memory what must not be kept for longer than its run.
        """
        used = {self._server_file(each.server_slot) for each in (checkpoint, *checkpoint.before)}
        for path in self.root.glob("server-*.safetensors"):
            if path not in used:
                path.unlink()

    def take_back(self, checkpoint: RunCheckpoint, rounds: int = 1) -> RunCheckpoint:
        """Undo the last committed rounds, and return the checkpoint before them.

        Raises TrainingError where the memories of that time are no longer kept.
        """
        if rounds > len(checkpoint.before):
            raise TrainingError(
                f"{self.root}: {rounds} rounds cannot be taken back, {len(checkpoint.before)} can"
            )
        before = replace(checkpoint.before[rounds - 1], before=checkpoint.before[rounds:])
        _replace(self.root / "checkpoint.json", before.to_json())
        return before

    def take_back_to(self, phase: str, round_: int) -> None:
        """Undo the committed rounds from this one on; `round_` counts from 1 within its phase.

        Raises TrainingError, which lists the rounds that can be taken back.
        """
        checkpoint = self.checkpoint()
        done = [] if checkpoint is None else self.history(checkpoint)
        names = [f"{entry['phase']}:{entry['round'] + 1}" for entry in done]
        possible = [] if checkpoint is None else names[len(names) - len(checkpoint.before) :]
        wanted = f"{phase}:{round_}"
        if checkpoint is None or wanted not in possible:
            known = ", ".join(possible) or "none"
            raise TrainingError(f"{self.root}: round {wanted} cannot be taken back; these can: {known}")
        self.take_back(checkpoint, len(possible) - possible.index(wanted))

    def _server_file(self, slot: Slot) -> Path:
        return self.root / f"server-{slot}.safetensors"


def _replace(path: Path, content: Mapping[str, Any]) -> None:
    try:
        write_durably(path, json.dumps(content).encode())
    except OSError as error:
        raise TrainingError(f"{path}: cannot be written: {error}; free some space and resume") from error


def differing(identity: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Say in which fields the identity of a run differs from that found in a folder."""
    wanted, held = _flat(json.loads(json.dumps(identity))), _flat(found)
    return [
        f"{name}: this run {json.dumps(wanted.get(name))}, the folder's {json.dumps(held.get(name))}"
        for name in sorted({*wanted, *held})
        if wanted.get(name) != held.get(name)
    ]


def _flat(identity: Mapping[str, Any]) -> dict[str, Any]:
    """`{"config": {"rounds": 3}}` -> `{"config.rounds": 3}`."""
    flat: dict[str, Any] = {}
    for name, value in identity.items():
        flat |= (
            {f"{name}.{field}": v for field, v in value.items()} if isinstance(value, dict) else {name: value}
        )
    return flat
