"""A hospital's line to the operator: requests that are repeated until they are answered, files in chunks."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from model_store.durable import naming
from training import headway
from training.engine.tensorfile import check_tensors
from training.errors import SiteFailed, TrainingError
from training.network.cell import CHUNK, Cell, Rejected, Unreachable
from training.network.handshake import check, complain, refusal
from training.network.kits import Kit
from training.network.messages import Alive, Leave, Message, Slice, TaskMessage, Written, pack, unpack

RETRY_S = 1.0
_TIMEOUT_S = 60.0  # for the reply to one request, at first; a chunk of a file on a slow line takes most
_LONGEST_S = 600.0  # for it on a slow line: a chunk at 7 kB/s
_IDLE_S = 2.0  # between questions for a task, if the operator does not wake the hospital
_GOODBYE_S = 5.0
_BEAT_S = 10.0  # between words on a step that computes


class Link:
    """Calls the operator at the kit's address. `waiting` gets the reason when a request must be repeated."""

    def __init__(self, kit: Kit, waiting: Callable[[str], None]) -> None:
        self._kit = kit
        self.cell = Cell(kit, self._notified)
        self._waiting = waiting
        self._awake = threading.Event()
        self._patience_s = _TIMEOUT_S
        self._interrupted = False
        self._handler: Any = None

    def start(self) -> None:
        """Connect. From here on Ctrl-C is remembered: NVFLARE catches every exception while it sends."""
        # What a shell runs in its background ignores Ctrl-C, and goes on so.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler and (
            threading.current_thread() is threading.main_thread()
        ):
            self._handler = signal.signal(signal.SIGINT, self._interrupt)
        self.cell.start()

    def stop(self) -> None:
        """Close the connection."""
        self.cell.stop()
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            self._handler = None

    def _interrupt(self, *_: object) -> None:
        self._interrupted = True
        raise KeyboardInterrupt

    def ask(self, topic: str, message: Message | None = None, body: bytes = b"") -> bytes:
        """Repeat a request until the operator answers, so that a lost reply does not cost a computed step.

        The operator may have served it before: it writes a chunk once and counts a report once. On a slow
        line requests wait longer, since a chunk that is sent again follows the first one over the same line.
        A first failure at once is no news: the first request often comes before the connection.
        Raises Rejected, KeyboardInterrupt after Ctrl-C, and TrainingError once the certificate ended.
        """
        content = b"" if message is None else pack(message, body)
        failed = 0
        while True:
            if self._interrupted:
                raise KeyboardInterrupt
            began = time.monotonic()
            try:
                reply = self.cell.request(topic, content, self._patience_s)
            except Unreachable as error:
                check(self._kit)
                timed_out = time.monotonic() - began >= self._patience_s
                if timed_out:
                    self._patience_s = min(2 * self._patience_s, _LONGEST_S)
                failed += 1
                if timed_out or failed > 1:
                    self._waiting(str(error) if failed != 2 else self._why(error))
                time.sleep(RETRY_S)
                continue
            self._patience_s = min(max(_TIMEOUT_S, 2 * (time.monotonic() - began)), _LONGEST_S)
            return reply

    def _why(self, error: Unreachable) -> str:
        """Why the operator does not answer: a refused handshake is said in no reply."""
        try:
            why = refusal(self._kit)
        except OSError:
            return str(error)
        if why is None:
            return str(error)
        complain(self._kit)
        return why

    def listen(self) -> None:
        """Begin to listen for the operator's call, before a question that it may have an answer to later."""
        self._awake.clear()

    def idle(self) -> None:
        """Wait until the operator calls, or for a moment."""
        self._awake.wait(_IDLE_S)

    def leave(self, session: str, reason: str) -> None:
        """Tell the operator, if it can be reached, that this hospital stops."""
        with suppress(Unreachable, Rejected):  # the round's deadline tells the operator
            self.cell.request("leave", pack(Leave(session=session, reason=reason)), _GOODBYE_S)

    @contextmanager
    def telling(self, session: str, task: str) -> Iterator[None]:
        """While a step computes, say how far it is: silence then says that a hospital is away, or hangs.

        A word that is lost, or that an operator of an earlier version does not know, is none the less.
        """
        over = threading.Event()

        def tell() -> None:
            while not over.wait(_BEAT_S):
                at = headway.now()
                said = Alive(session=session, task=task, done=at.done, planned=at.planned)
                with suppress(Unreachable, Rejected):
                    self.cell.request("alive", pack(said), _BEAT_S)

        headway.begin()
        threading.Thread(target=tell, name="alive", daemon=True).start()
        try:
            yield
        finally:
            # Not waited for: its last word may be on its way to an operator that is away.
            over.set()

    def download(self, session: str, task: TaskMessage, folder: Path) -> dict[str, Path]:
        """Fetch the groups of a task as files of a folder, and check their headers.

        Raises SiteFailed for another size than the task says, and for a file that has no tensors.
        """
        paths: dict[str, Path] = {}
        for group, size in task.downloads.items():
            paths[group] = folder / f"down-{group}"
            folder.mkdir(parents=True, exist_ok=True)
            with naming(paths[group]), paths[group].open("wb") as file:
                while (at := file.tell()) < size:
                    part = Slice(session=session, task=task.id, group=group, offset=at)
                    chunk = self.ask("read", part)
                    if not chunk or at + len(chunk) > size:
                        raise SiteFailed(f"group '{group}': expected {size} bytes, found {at + len(chunk)}")
                    file.write(chunk)
            try:
                check_tensors(paths[group])
            except TrainingError as error:
                raise SiteFailed(f"the download of group '{group}': {error}") from error
        return paths

    def upload(self, session: str, task: str, group: str, path: Path) -> None:
        """Send a file in chunks. After a lost reply a chunk is sent again, and counts once."""
        size = path.stat().st_size
        with path.open("rb") as file:
            at = 0
            while at < size:
                file.seek(at)
                part = Slice(session=session, task=task, group=group, offset=at, total=size)
                written, _ = unpack(Written, self.ask("write", part, file.read(CHUNK)))
                at = written.at

    def _notified(self, peer: str, topic: str, content: bytes) -> bytes:  # noqa: ARG002
        if topic == "wake":
            self._awake.set()
        return b""
