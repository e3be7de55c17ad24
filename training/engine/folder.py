"""A run's folder: enough to go on after a kill at any instant, with the same result.

RUN/run.json                 what the run is: method, configuration, data, seed
RUN/checkpoint.json          the last committed round; points at the server's slot and at each site's
RUN/history.jsonl            one line per committed round; what lies beyond the checkpoint's length is not
RUN/server-{a,b}.safetensors the server's memory
RUN/sites/SITE/memory-{a,b}.safetensors   the site's own memory; stays at the site
RUN/sites/SITE/failures.log  why steps of the site failed, in full; stays at the site
RUN/sites/SITE/key           what its noise is drawn from, where it adds some; stays at the site
RUN/exchange/                tensors on their way between processes; emptied when the run ends, or is ended

Memories alternate between two slots: a step writes the slot that the last committed round does *not* point
at, so whatever is half-written when the power goes is not referred to. Replacing checkpoint.json, by one
rename, is what commits a round.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from model_store.durable import sync_folder, write_durably
from training.algorithm import Memory
from training.engine.tensorfile import read_tensors, write_tensors
from training.errors import RunMismatch, TrainingError

Slot = Literal["a", "b"]
FAILURES = "failures.log"


def other(slot: Slot | None) -> Slot:
    """The slot that may be written while `slot` must stay."""
    return "b" if slot == "a" else "a"


@dataclass(frozen=True)
class RunCheckpoint:
    """Where a run stands: `step` indexes the plan, `round` is the next one to do within it."""

    step: int
    round: int
    server_slot: Slot
    site_slots: Mapping[str, Slot] = field(default_factory=dict)
    history_bytes: int = 0


class SiteFolder:
    """One site's own memory. Only processes that work for the site touch it."""

    def __init__(self, root: Path, site: str) -> None:
        self._path = root / "sites" / site

    def save(self, slot: Slot, memory: Memory) -> None:
        """Write a slot that no committed round refers to."""
        write_tensors(self._file(slot), memory.tensors, memory.facts, durable=True)

    def load(self, slot: Slot | None) -> Memory:
        """The memory in a slot; an empty one when the site never had any."""
        return Memory() if slot is None else Memory(*read_tensors(self._file(slot)))

    def key(self) -> bytes:
        """The site's own, which nobody else can guess; made when it is first asked for."""
        path = self._path / "key"
        if not path.exists():
            self._path.mkdir(parents=True, exist_ok=True)
            write_durably(path, secrets.token_bytes(32), mode=0o600)
        return path.read_bytes()

    def note_failure(self, text: str) -> None:
        """Add to the site's own account of what went wrong; where that cannot be written, it is lost."""
        with suppress(OSError):
            self._path.mkdir(parents=True, exist_ok=True)
            path = self._path / FAILURES
            path.touch(mode=0o600)
            # A file name need not be text.
            with path.open("a", encoding="utf-8", errors="backslashreplace") as log:
                log.write(f"{text}\n")

    def _file(self, slot: Slot) -> Path:
        return self._path / f"memory-{slot}.safetensors"


class RunFolder:
    """The server's side of a run's folder."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self.exchange = self.root / "exchange"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes out of the folder. Raises TrainingError when one is in it.

        The lock goes with the process that holds it, so a kill leaves none behind.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise TrainingError(
                    f"{self.root} is in use by another process; wait for it, or take another folder"
                ) from error
            yield

    def claim(self, identity: Mapping[str, Any], *, resume: bool) -> None:
        """Make the folder this run's.

        Raises RunMismatch when it holds another run (naming the fields that differ), or the same one without
        `resume`.
        """
        path = self.root / "run.json"
        if not path.exists():
            self.root.mkdir(parents=True, exist_ok=True)
            _replace(path, dict(identity))
            return
        wanted, found = _flat(json.loads(json.dumps(identity))), _flat(json.loads(path.read_text()))
        differences = [
            f"{name}: this run {json.dumps(wanted.get(name))}, the folder's {json.dumps(found.get(name))}"
            for name in sorted({*wanted, *found})
            if wanted.get(name) != found.get(name)
        ]
        if differences:
            raise RunMismatch(
                f"{self.root} holds another run; take another folder, or resume what it was started with",
                differences,
            )
        if not resume and self.checkpoint() is not None:
            raise RunMismatch(
                f"{self.root} holds this run already", ["resume it, or delete the folder to start anew"]
            )

    def checkpoint(self) -> RunCheckpoint | None:
        """The last committed round; None before the first."""
        path = self.root / "checkpoint.json"
        return RunCheckpoint(**json.loads(path.read_text())) if path.exists() else None

    def server(self, slot: Slot) -> Memory:
        """The server's memory in a slot."""
        return Memory(*read_tensors(self._server_file(slot)))

    def history(self, checkpoint: RunCheckpoint) -> list[dict[str, Any]]:
        """What was noted of each committed round."""
        content = (self.root / "history.jsonl").read_bytes()[: checkpoint.history_bytes]
        return [json.loads(line) for line in content.splitlines()]

    def commit(self, checkpoint: RunCheckpoint, server: Memory, note: Mapping[str, Any]) -> RunCheckpoint:
        """Make a round part of the run: all of it or, after a kill, nothing of it.

        `checkpoint.history_bytes` is the length before this round; `note` is added. Returns the checkpoint.
        """
        write_tensors(self._server_file(checkpoint.server_slot), server.tensors, server.facts, durable=True)
        line = json.dumps(note).encode() + b"\n"
        path = self.root / "history.jsonl"
        new = not path.exists()
        with path.open("wb" if new else "r+b") as file:
            file.truncate(checkpoint.history_bytes)
            file.seek(checkpoint.history_bytes)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        if new:
            sync_folder(self.root)
        committed = replace(checkpoint, history_bytes=checkpoint.history_bytes + len(line))
        _replace(self.root / "checkpoint.json", committed.__dict__)
        return committed

    def empty_exchange(self) -> None:
        """Remove what travelled: nothing of a site lies about for longer than its run."""
        for path in self.exchange.glob("*"):
            path.unlink()

    def take_back(self, checkpoint: RunCheckpoint, step: int) -> RunCheckpoint:
        """Undo the last committed round, which was all of plan step `step` and changed no site's memory.

        The server's memory before it is still in its other slot.
        """
        path = self.root / "history.jsonl"
        lines = path.read_bytes()[: checkpoint.history_bytes].splitlines(keepends=True)
        before = replace(
            checkpoint,
            step=step,
            round=0,
            server_slot=other(checkpoint.server_slot),
            history_bytes=checkpoint.history_bytes - len(lines[-1]),
        )
        _replace(self.root / "checkpoint.json", before.__dict__)
        return before

    def _server_file(self, slot: Slot) -> Path:
        return self.root / f"server-{slot}.safetensors"


def _replace(path: Path, content: Mapping[str, Any]) -> None:
    try:
        write_durably(path, json.dumps(content).encode())
    except OSError as error:
        raise TrainingError(f"{path}: cannot be written: {error}; free some space and resume") from error


def _flat(identity: Mapping[str, Any]) -> dict[str, Any]:
    """`{"config": {"rounds": 3}}` -> `{"config.rounds": 3}`."""
    flat: dict[str, Any] = {}
    for name, value in identity.items():
        flat |= (
            {f"{name}.{field}": v for field, v in value.items()} if isinstance(value, dict) else {name: value}
        )
    return flat
