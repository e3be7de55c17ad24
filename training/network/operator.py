"""The operator's side: it listens, and gives the engine's tasks to the hospitals that joined.

    Admission   who may join: certificates, versions, digests, and what each hospital announces
    Sessions    who is here: the last process of each hospital, and who left
    Rounds      the tasks of the current round, the files that travel, deadlines

`Operator` puts them together and is a pool for the engine (`training.engine.pool.Pool`). One condition guards
the state of all three, since a join or a departure changes several of them at once; the operator makes it.
"""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType, TracebackType

from training.algorithm import Phase
from training.bounds import NO_BOUNDS
from training.config import RunConfig
from training.data.cases import RemoteSite, SiteCounts
from training.engine.egress import ALL_KINDS, check_privacy
from training.engine.folder import RunFolder
from training.engine.worker import Delivery, Failure, Task
from training.errors import ConfigurationError
from training.network.admission import Admission
from training.network.calendar import ahead
from training.network.cell import Cell, Handler, Rejected, printable
from training.network.door import Door, Heard
from training.network.kits import Kit
from training.network.messages import (
    About,
    Alive,
    Announcement,
    Leave,
    Next,
    Planned,
    Report,
    Session,
    Slice,
    Welcome,
    check_wire,
    pack,
    unpack,
)
from training.network.roster import Roster
from training.network.rounds import NO_DEADLINE, POLL_S, RoundLimits, Rounds
from training.network.runs import NetworkRecord, NetworkRun
from training.network.sessions import OpenSession, Sessions

# A busy hospital asks late, and one that heard nothing waits for the next run.
_GOODBYE_S = 20.0
_REVOKED = "its certificate was revoked"
_OF_SESSIONS: Mapping[str, type[Session]] = MappingProxyType(
    {"next": Session, "alive": Alive, "read": Slice, "write": Slice, "done": Report, "leave": Leave}
)


class Listener:
    """The operator's cell, for one run after the other: NVFLARE starts one cell of a name in a process.

    It listens at the kit's address, or at `listen`. Use it as a context manager.
    """

    def __init__(self, kit: Kit, listen: str | None = None) -> None:
        self.kit = kit
        self._listen = listen
        self._cell: Cell | None = None
        self._kept_out: Heard = lambda *_: None
        self._opened = ExitStack()

    def __enter__(self) -> Listener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    def serve(self, handler: Handler, disconnected: Callable[[str], None], kept_out: Heard) -> None:
        """Let `handler` serve the requests from now on, and `disconnected` hear of lost connections.

        `kept_out` hears of a hospital that TLS refuses. The first run starts to listen. Raises
        ConfigurationError when the kit is in use or the port is taken.
        """
        self._kept_out = kept_out
        if self._cell is not None:
            self._cell.on_disconnect(disconnected)
            self._cell.hand_over(handler)
            return
        with ExitStack() as opened:
            lock = opened.enter_context((self.kit.folder / ".lock").open("w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigurationError(
                    f"{self.kit.folder} is in use",
                    ["another run, or `listen`, uses this kit: wait for the run, or stop `listen`"],
                ) from error
            door = Door(
                self.kit,
                self._listen or self.kit.content.address,
                lambda site, why: self._kept_out(site, why),
            )
            cell = Cell(self.kit, handler, door.open())
            opened.callback(door.close)
            cell.on_disconnect(disconnected)
            cell.start()
            opened.callback(cell.stop)
            self._opened = opened.pop_all()
        self._cell = cell

    def wake(self, site: str) -> None:
        """Tell a hospital that there is something to ask for; the message may be lost."""
        if self._cell is not None:
            self._cell.notify("wake", site)


class Operator:
    """A run over the network, as the engine's pool. Use it as a context manager.

    `folder` is the run's folder; `id` is the run's, as the hospitals see it; `warn` receives messages for the
    operator. `follows` says that another run of this listener follows, for which the hospitals stay. Raises
    ConfigurationError for a quorum or for privacy that the run cannot have.
    """

    def __init__(
        self,
        listener: Listener,
        folder: Path,
        run: NetworkRun,
        limits: RoundLimits = NO_DEADLINE,
        *,
        follows: bool = False,
    ) -> None:
        if limits.quorum is not None and not 1 <= limits.quorum <= len(run.sites):
            raise ConfigurationError(
                "the run cannot start",
                [f"quorum: expected 1 to {len(run.sites)} hospitals, found {limits.quorum}"],
            )
        self.window = max(1, len(run.sites))
        self.warn: Callable[[str], None] = lambda _: None
        self._listener = listener
        self._kit = listener.kit
        self._folder = folder
        self._sites = run.sites
        self._limits = limits
        self._follows = follows
        self._plan = run.algorithm().plan()
        check_privacy(self._plan, run.settings.privacy)
        self._roster = Roster(self._kit)
        record = NetworkRecord(folder)
        self.id = record.id
        self._changed = threading.Condition()
        self._admission = Admission(self._kit, run.invitation(record.id), record, self._changed)
        # A resumed run keeps the hospitals that were revoked since it began.
        left = dict.fromkeys(self._kit.revoked_sites().intersection(run.sites), _REVOKED)
        self._sessions = Sessions(self._changed, left, listener.wake)
        named = (*run.task.labels, *run.task.class_names)
        self._rounds = Rounds(
            self._plan,
            frozenset(named),
            limits,
            self._sessions,
            self._changed,
            lambda: self.quorum,
        )

    def __enter__(self) -> Operator:
        self._listener.serve(self.handle, self._sessions.disconnected, self._keep_out)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._sessions.end(Next(over="the run is finished", follows=self._follows), _GOODBYE_S)

    @property
    def quorum(self) -> int:
        """How many hospitals of a round must deliver: by default all but those that were revoked since."""
        there = len(self._sites) - len(self._kit.revoked_sites().intersection(self._sites))
        return self._limits.quorum or max(1, there)

    def tell(self, warn: Callable[[str], None], working: Callable[[str, int, int], None]) -> None:
        """Let `warn` hear messages for the operator, and `working` how far a hospital's step is.

        `working` gets the hospital, the batches done, and those planned so far.
        """
        self.warn, self._rounds.working = warn, working

    @property
    def announced(self) -> Mapping[str, Announcement]:
        """What each hospital announced when it joined."""
        return self._admission.announced

    def images(self) -> dict[str, int]:
        """How many training images each hospital announced.

        Raises ConfigurationError where a hospital counts what leaves with noise: a rehearsal would cost it.
        """
        if noisy := [site for site, said in self.announced.items() if said.privacy is not None]:
            raise ConfigurationError(
                "the rehearsal cannot start",
                [f"{', '.join(noisy)}: weights leave with noise, and each round costs epsilon; leave it out"],
            )
        return {site: said.images or 0 for site, said in self.announced.items()}

    @property
    def differences(self) -> list[str]:
        """Which versions of the hospitals that joined differ from the operator's, and what that means."""
        return self._admission.differences()

    def gather(
        self, waiting: Callable[[tuple[str, ...]], None], *, resume: bool = False
    ) -> tuple[RemoteSite, ...]:
        """Wait until every hospital of the run has joined, and fix what they announced.

        `waiting` is called with the names of those that are missing, whenever they change. Before the first
        committed round all hospitals must be connected, and a join replaces the one before. After it the run
        goes on with what they announced. A resumed run of which only the export is left waits for those that
        are not in it to join now, for the deadline of a round at most: they may have consented since.
        """
        missing: tuple[str, ...] = ()
        asked, started = self._unexported() if resume else frozenset(), time.monotonic()

        def now_missing() -> tuple[str, ...]:
            deadline = self._limits.deadline
            late = deadline is not None and time.monotonic() - started >= deadline
            here = self._sessions.connected()
            if not self._admission.fixed:
                return tuple(name for name in self._sites if name not in here)
            wanted = frozenset() if late else asked - here
            return tuple(name for name in self._sites if name not in self.announced or name in wanted)

        with self._changed:
            while now := now_missing():
                if now != missing:
                    missing = now
                    waiting(missing)
                self._changed.wait(POLL_S)
            self._admission.fix()
            return tuple(_remote(name, self.announced[name]) for name in self._sites)

    def _unexported(self) -> frozenset[str]:
        """The hospitals that are not in the last phase of a finished run, if it is one that needs consent."""
        folder = RunFolder(self._folder)
        checkpoint, last = folder.checkpoint(), self._plan[-1]
        if checkpoint is None or checkpoint.step < len(self._plan):
            return frozenset()
        if not isinstance(last, Phase) or not last.consent:
            return frozenset()
        exported = folder.history(checkpoint)[-1]["sites"]
        return frozenset(self._sites) - {*exported} - self._kit.revoked_sites()

    def policies(self, settings: RunConfig) -> RunConfig:
        """Return the settings with the hospitals' policies: what may leave, bounds, privacy, consent."""
        said = {name: self.announced[name] for name in self._sites}
        content = settings.model_dump() | {
            "egress": {n: a.allows for n, a in said.items() if frozenset(a.allows) != ALL_KINDS},
            "feature_bounds": {n: a.bounds for n, a in said.items() if a.bounds != NO_BOUNDS},
            "privacy_demands": {n: a.privacy for n, a in said.items() if a.privacy is not None},
            "consent": tuple(n for n, a in said.items() if a.consents),
        }
        return RunConfig.model_validate(content)

    def run(self, tasks: Sequence[Task]) -> Iterator[Delivery | Failure]:
        """Give the hospitals their tasks, and yield their results in task order."""
        if any(task.step is not None for task in tasks):
            yield from self._rounds.run(tasks, self.warn)
            return
        # A hospital reads and checks its data before it joins.
        for task in tasks:
            said = self.announced[task.site]
            yield Delivery(task.site, {}, {}, 0.0, {}, (), None, 0.0, scored=said.scored, images=said.images)

    def handle(self, peer: str, topic: str, content: bytes) -> bytes:
        """Serve a request of a hospital; called in threads. `peer` is its certificate's name.

        Raises Rejected.
        """
        if peer not in self._sites:
            raise Rejected(f"'{peer}' takes no part in this run", "stranger")
        try:
            reply = self._answer(peer, topic, content)
        except Rejected as error:
            if error.code in ("mismatch", "revoked") and self._roster.refused(peer, str(error)):
                self.warn(f"{peer} cannot take part: {printable(str(error))}")
            raise
        self._roster.heard(peer)
        return reply

    def _keep_out(self, site: str | None, why: str) -> None:
        if said := self._roster.kept_out(site, why):
            self.warn(said)

    def _answer(self, peer: str, topic: str, content: bytes) -> bytes:
        if topic == "hello":
            self._roster.heard(peer, unpack(About, content)[0])
            return pack(Planned(runs=ahead(self._kit, peer)))
        if topic == "invite":
            check_wire(peer, content)
            return pack(self._admission.invite(peer))
        if topic == "join":
            return pack(self._join(peer, unpack(Announcement, content)[0]))
        if topic not in _OF_SESSIONS:
            raise Rejected("unknown request")
        said, body = unpack(_OF_SESSIONS[topic], content)
        session = self._session(peer, said)
        if isinstance(said, Slice):
            if topic == "read":
                return self._rounds.read(peer, said)
            return pack(self._rounds.write(peer, said, body))
        if isinstance(said, Alive):
            self._rounds.alive(peer, said)
            return b""
        if isinstance(said, Report):
            self._rounds.done(peer, said)
            return b""
        if isinstance(said, Leave):
            self._dismiss(peer, f"left the run: {printable(said.reason)}")
            return b""
        return pack(self._sessions.last_message(session) or self._rounds.next(peer))

    def _join(self, peer: str, said: Announcement) -> Welcome:
        serial = self._admission.check(peer, said)
        with self._changed:
            self._admission.enter(peer, said)
            return Welcome(session=self._sessions.open(peer, serial))

    def _session(self, peer: str, said: Session) -> OpenSession:
        """The session of a request. A hospital that was revoked since it joined is dismissed."""
        session = self._sessions.get(peer, said.session)
        try:
            self._admission.check_revoked(session.serial)
        except Rejected:
            self._dismiss(peer, _REVOKED)
            raise
        return session

    def _dismiss(self, peer: str, reason: str) -> None:
        """Go on without a hospital until it joins again."""
        with self._changed:
            self._sessions.dismiss(peer, reason)
            self._rounds.fail(peer, reason)
        self.warn(f"{peer}: {reason}")


def _remote(name: str, said: Announcement) -> RemoteSite:
    return RemoteSite(name, said.digest, said.splits_digest, SiteCounts(said.files, said.patients))
