"""The folder of a run: checkpoints from which a run killed at any instant resumes with the same result.

RUN/run.json                 identity of the run: method, configuration, data, seed
RUN/checkpoint.json          the last committed round; points at the server's slot and at each site's
RUN/history.jsonl            one line per committed round; bytes beyond the checkpoint's length are ignored
RUN/server-{a,b}.safetensors the server's memory
RUN/sites/SITE/memory-{a,b}.safetensors   the site's own memory; stays at the site
RUN/sites/SITE/failures.log  tracebacks of failed steps of the site; stays at the site
RUN/sites/SITE/key           secret from which the site's noise is drawn, if it adds any; stays at the site
RUN/exchange/                tensors in transit between processes; emptied when the run ends or is stopped

Memories alternate between two slots. A step writes the slot that the last committed round does *not* point
at, so a file left half-written by a crash is never read. A round is committed by replacing checkpoint.json in
one rename.
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
    """Return the slot that may be overwritten while `slot` must be kept."""
    return "b" if slot == "a" else "a"


@dataclass(frozen=True)
class RunCheckpoint:
    """Progress of a run: `step` indexes the plan, `round` is the next round within that step."""

    step: int
    round: int
    server_slot: Slot
    site_slots: Mapping[str, Slot] = field(default_factory=dict)
    history_bytes: int = 0


class SiteFolder:
    """The private folder of one site. Only processes that run the site's steps access it."""

    def __init__(self, root: Path, site: str) -> None:
        self._path = root / "sites" / site

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

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self.exchange = self.root / "exchange"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder against other processes. Raises TrainingError when another process holds the lock.

        The operating system releases the lock when the process ends, so a kill leaves no stale lock.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise TrainingError(
                    f"{self.root} is in use by another process; wait for it, or use another folder"
                ) from error
            yield

    def claim(self, identity: Mapping[str, Any], *, resume: bool) -> None:
        """Record the run's identity in the folder, or compare it with the identity recorded there.

        Raises RunMismatch when the folder holds another run (naming the fields that differ), or holds the
        same run and `resume` is false.
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
                f"{self.root} holds another run; use another folder, or resume with the original settings",
                differences,
            )
        if not resume and self.checkpoint() is not None:
            raise RunMismatch(
                f"{self.root} holds this run already", ["resume it, or delete the folder to start again"]
            )

    def checkpoint(self) -> RunCheckpoint | None:
        """Read the checkpoint of the last committed round, or return None before the first."""
        path = self.root / "checkpoint.json"
        return RunCheckpoint(**json.loads(path.read_text())) if path.exists() else None

    def server(self, slot: Slot) -> Memory:
        """Read the server's memory in a slot."""
        return Memory(*read_tensors(self._server_file(slot)))

    def history(self, checkpoint: RunCheckpoint) -> list[dict[str, Any]]:
        """Read the notes of the committed rounds."""
        content = (self.root / "history.jsonl").read_bytes()[: checkpoint.history_bytes]
        return [json.loads(line) for line in content.splitlines()]

    def commit(self, checkpoint: RunCheckpoint, server: Memory, note: Mapping[str, Any]) -> RunCheckpoint:
        """Commit a round and return the new checkpoint. Atomic: a kill leaves the whole round or none of it.

        `checkpoint.history_bytes` is the length of the history before this round; `note` is appended to it.
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
        """Delete the exchanged tensors, so that no site's data is kept for longer than its run."""
        for path in self.exchange.glob("*"):
            path.unlink()

    def take_back(self, checkpoint: RunCheckpoint, step: int) -> RunCheckpoint:
        """Undo the last committed round, and return the checkpoint before it.

        The round must be the only one of plan step `step` and must have changed no site's memory. The
        server's previous memory is still in its other slot.
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
