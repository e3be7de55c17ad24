"""The operator's side: hospitals that joined, the tasks of a round, and the files that travel.

`Operator` is a pool for the engine (`training.engine.pool.Pool`). A round's tasks stay current until each
hospital reported or its time is over. A hospital that is killed and started again asks for its task again and
repeats it from its own memory, with the same result. A report counts only for the task that is current.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import NameOID
from cryptography.x509.verification import VerificationError

from model_store.durable import write_durably
from model_store.task import Task as ModelTask
from training.algorithm import Phase, Plan
from training.bounds import NO_BOUNDS
from training.config import MethodConfig, RunConfig
from training.data.cases import RemoteSite, SiteCounts
from training.engine.egress import ALL_KINDS, check_privacy
from training.engine.folder import RunFolder
from training.engine.tensorfile import check_tensors
from training.engine.worker import Delivery, Failure, Task
from training.errors import ConfigurationError, TrainingError
from training.methods.registry import method as find_method
from training.network.cell import CHUNK, Cell, Rejected, printable
from training.network.kits import Kit
from training.network.messages import (
    PROTOCOL,
    Announcement,
    Invitation,
    Leave,
    Next,
    Report,
    Session,
    Slice,
    TaskMessage,
    Welcome,
    Written,
    configuration_digest,
    differences,
    pack,
    plan_digest,
    settings_of,
    unpack,
    versions,
)
from training.privacy import Spent

NETWORK_FILE = "network.json"
_POLL_S = 1.0
_PATIENCE_S = 30.0  # before the operator sees a warning that a hospital is missing
_GOODBYE_S = 5.0
_MOST_SLICES = 2**14  # of one file: several times the longest scans
_REVOKED = "its certificate was revoked"


@dataclass(frozen=True)
class RoundLimits:
    """When a round ends without a hospital.

    `deadline`: seconds after which hospitals that have not delivered are dropped from the round; None waits
    for all. `quorum`: hospitals that must deliver; after the deadline, too, the round waits for so many, or
    for all of a round with fewer. With fewer uploads that the server accepts the round fails.
    `upload_bytes`: the largest upload of one hospital in a round.
    """

    deadline: float | None = None
    quorum: int = 1
    upload_bytes: int = 4 * 2**30


@dataclass
class _Session:
    token: str
    serial: int
    connected: bool = True
    heard_end: bool = False


@dataclass
class _Work:
    """One hospital's part of the current round."""

    id: str
    task: Task
    phase: Phase
    answer: Delivery | Failure | None = None
    received: dict[str, int] = field(default_factory=dict)
    writing: threading.Lock = field(default_factory=threading.Lock)

    def download(self, group: str) -> Path:
        path = (self.task.received or {}).get(group)
        if path is None:
            raise Rejected(f"there is no download '{group[:64]}' in task {self.id}")
        return path

    def upload(self, group: str) -> Path:
        if group not in {declared.name for declared in self.phase.uploads}:
            raise Rejected(f"phase '{self.phase.name}' uploads no group '{group[:64]}'")
        assert self.task.upload is not None
        return self.task.upload.with_name(f"{self.task.upload.name}-{group}")


class Operator:
    """The operator's cell with its sessions, as a pool. Use it as a context manager.

    `folder` is the run's folder; `warn` receives messages for the operator. `follows` says that another run
    follows this one, for which the hospitals stay. Raises ConfigurationError when
    the kit is in use or the port is taken.
    """

    def __init__(
        self,
        kit: Kit,
        folder: Path,
        sites: Sequence[str],
        method: str,
        config: MethodConfig,
        settings: RunConfig,
        task: ModelTask,
        limits: RoundLimits = RoundLimits(),
        listen: str | None = None,
        *,
        follows: bool = False,
        before: Operator | None = None,
    ) -> None:
        if not 1 <= limits.quorum <= len(sites):
            raise ConfigurationError(
                "the run cannot start",
                [f"quorum: expected 1 to {len(sites)} hospitals, found {limits.quorum}"],
            )
        self.window = max(1, len(sites))
        self.quorum = limits.quorum
        self._kit = kit
        self._follows = follows
        self._sites = tuple(sites)
        self._limits = limits
        self._labels = frozenset(task.labels)
        self.warn: Callable[[str], None] = lambda _: None
        self._authority = x509.load_pem_x509_certificate(kit.authority.read_bytes())
        algorithm = find_method(method).build(config, task)
        self._plan: Plan = algorithm.plan()
        check_privacy(self._plan, settings.privacy)
        self._record = folder / NETWORK_FILE
        folder.mkdir(parents=True, exist_ok=True)
        found = json.loads(self._record.read_text()) if self._record.exists() else {}
        self._run: str = found.get("run") or secrets.token_hex(32)
        # Until a round is committed nothing depends on what the hospitals announced: they join again.
        self._fixed = RunFolder(folder).checkpoint() is not None
        sites_said = found.get("sites", {}) if self._fixed else {}
        self.announced = {name: Announcement.model_validate(said) for name, said in sites_said.items()}
        shared = settings_of(settings)
        self._invitation = Invitation(
            protocol=PROTOCOL,
            software=versions(),
            run=self._run,
            method=method,
            config=config.model_dump(mode="json"),
            settings=shared,
            task=task.model_dump(mode="json"),
            plan_digest=plan_digest(algorithm),
            configuration_digest=configuration_digest(method, config, shared, task),
            nonce="-",
        )
        self._changed = threading.Condition()
        # The last few of each hospital: one that was restarted may ask again before it joins.
        self._nonces: dict[str, deque[str]] = {}
        self._sessions: dict[str, _Session] = {}
        # A resumed run keeps the hospitals that were revoked since it began.
        self._left = dict.fromkeys(kit.revoked_sites().intersection(sites), _REVOKED)
        self._work: dict[str, _Work] = {}
        self._over: str | None = None
        self._open = ExitStack()
        self._before = before
        self._cell: Cell = before._cell if before else Cell(kit, self.handle, listen)

    def __enter__(self) -> Operator:
        self._cell.on_disconnect(self._disconnected)
        if self._before is not None:
            # NVFLARE starts one cell of a name in a process.
            self._open = self._before._open.pop_all()
            self._cell.hand_over(self.handle)
            return self
        lock = self._open.enter_context((self._kit.folder / ".lock").open("w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._open.close()
            raise ConfigurationError(
                f"{self._kit.folder} is in use", ["another run listens with this kit; wait for it"]
            ) from error
        try:
            self._cell.start()
        except BaseException:
            self._open.close()
            raise
        self._open.callback(self._cell.stop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            with self._changed:
                self._over = "the run is finished"
            self._wake()
            self._until(
                lambda: all(s.heard_end or not s.connected for s in self._sessions.values()), _GOODBYE_S
            )
        if error is not None or not self._follows:
            self.close()

    def close(self) -> None:
        """Stop listening, if no other operator goes on with it."""
        self._open.close()

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
            here = {name for name, session in self._sessions.items() if session.connected}
            if not self._fixed:
                return tuple(name for name in self._sites if name not in here)
            wanted = frozenset() if late else asked - here
            return tuple(name for name in self._sites if name not in self.announced or name in wanted)

        with self._changed:
            while now := now_missing():
                if now != missing:
                    missing = now
                    waiting(missing)
                self._changed.wait(_POLL_S)
            self._fixed = True
            return tuple(_remote(name, self.announced[name]) for name in self._sites)

    def _unexported(self) -> frozenset[str]:
        """The hospitals that are not in the last phase of a finished run, if it is one that needs consent."""
        folder = RunFolder(self._record.parent)
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
        if all(task.step is None for task in tasks):
            # A hospital reads and checks its data before it joins.
            for task in tasks:
                said = self.announced[task.site]
                yield Delivery(
                    task.site, {}, {}, 0.0, {}, (), None, 0.0, scored=said.scored, images=said.images
                )
            return
        started = time.monotonic()
        with self._changed:
            self._work = {task.site: self._new(task) for task in tasks}
        try:
            self._wake(*(task.site for task in tasks))
            for task in tasks:
                yield self._await(task.site, started)
        finally:
            with self._changed:
                ended, self._work = self._work, {}
            for work in ended.values():
                with work.writing:
                    pass  # the next round writes the same files

    def _new(self, task: Task) -> _Work:
        assert task.step is not None
        phase = self._plan[task.step]
        assert isinstance(phase, Phase)
        work = _Work(f"{task.step}-{task.round}-{secrets.token_hex(4)}", task, phase)
        if task.site in self._left:
            work.answer = Failure(task.site, self._left[task.site])
        return work

    def _await(self, site: str, started: float) -> Delivery | Failure:
        deadline = self._limits.deadline
        warned = False
        with self._changed:
            work = self._work[site]
            quorum = min(self.quorum, len(self._work))
            while work.answer is None:
                waited = time.monotonic() - started
                delivered = sum(isinstance(w.answer, Delivery) for w in self._work.values())
                if deadline is not None and waited >= deadline and delivered >= quorum:
                    work.answer = Failure(site, f"did not deliver within {deadline:g} s")
                    break
                session = self._sessions.get(site)
                if not warned and waited >= _PATIENCE_S and (session is None or not session.connected):
                    warned = True
                    self.warn(
                        f"waiting for {site}, which is not connected; it repeats its step when it is back"
                    )
                left = _POLL_S if deadline is None else min(_POLL_S, max(deadline - waited, 0.05))
                self._changed.wait(left)
            return work.answer

    def handle(self, peer: str, topic: str, content: bytes) -> bytes:
        """Serve a request of a hospital; called in threads. `peer` is its certificate's name.

        Raises Rejected.
        """
        if peer not in self._sites:
            raise Rejected(f"'{peer}' takes no part in this run", "stranger")
        if topic == "invite":
            return self._invite(peer)
        if topic == "join":
            return pack(self._join(peer, unpack(Announcement, content)[0]))
        if topic == "next":
            return pack(self._next(peer, unpack(Session, content)[0]))
        if topic == "read":
            return self._read(peer, unpack(Slice, content)[0])
        if topic == "write":
            return pack(self._write(peer, *unpack(Slice, content)))
        if topic == "done":
            self._done(peer, unpack(Report, content)[0])
            return b""
        if topic == "leave":
            self._leave(peer, unpack(Leave, content)[0])
            return b""
        raise Rejected("unknown request")

    def _invite(self, peer: str) -> bytes:
        nonce = secrets.token_hex(32)
        with self._changed:
            self._nonces.setdefault(peer, deque(maxlen=4)).append(nonce)
        return pack(self._invitation.model_copy(update={"nonce": nonce}))

    def _join(self, peer: str, said: Announcement) -> Welcome:
        ours = self._invitation
        problems = differences(ours.software, said.software, peer)
        if said.protocol != PROTOCOL:
            problems.append(f"protocol: expected {PROTOCOL}, found {said.protocol} at {peer}")
        for name in ("plan_digest", "configuration_digest"):
            if getattr(ours, name) != getattr(said, name):
                problems.append(
                    f"{name}: expected {getattr(ours, name)[:12]}, found {getattr(said, name)[:12]}"
                )
        files = said.files.get("train", 0)
        if files < 1:
            problems.append("there is no case to train on")
        elif said.images is None or not 1 <= said.images <= files * _MOST_SLICES:
            problems.append(
                f"images: expected 1 to {files * _MOST_SLICES} training images of {files} files, found "
                f"{said.images}"
            )
        if problems:
            raise Rejected("; ".join(problems), "mismatch")
        serial = self._certified(peer, said)
        with self._changed:
            before = self.announced.get(peer) if self._fixed else None
            if before is not None and (before.digest, before.splits_digest) != (
                said.digest,
                said.splits_digest,
            ):
                raise Rejected(
                    "the hospital's data changed since this run began; restore it, or ask the operator to "
                    "start another run",
                    "mismatch",
                )
            if before is not None:
                said = before.model_copy(update={"consents": said.consents})
            if said != self.announced.get(peer):
                self._remember(peer, said)
            token = secrets.token_hex(32)
            self._sessions[peer] = _Session(token, serial)
            self._left.pop(peer, None)
            self._changed.notify_all()
        return Welcome(session=token)

    def _certified(self, peer: str, said: Announcement) -> int:
        """Return the serial number of the certificate, after checking that the hospital holds its key.

        TLS has checked a certificate already, but does not show its serial number, which revocation needs.
        """
        from nvflare.lighter.utils import verify_cert_chain, verify_content

        with self._changed:
            nonces = self._nonces.get(peer, deque())
            if said.nonce not in nonces:
                raise Rejected("the invitation is not known any more; ask again", "session")
            nonces.remove(said.nonce)
        try:
            certificate = x509.load_pem_x509_certificate(said.certificate.encode())
            verify_cert_chain(certificate, [], self._authority)
            verify_content(said.nonce, said.signature, certificate.public_key())
            names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        except (ValueError, TypeError, InvalidSignature, VerificationError) as error:
            raise Rejected("the certificate or its signature is not valid", "revoked") from error
        if [name.value for name in names] != [peer]:
            raise Rejected(f"the certificate is not that of '{peer}'", "revoked")
        self._check_revoked(certificate.serial_number)
        return certificate.serial_number

    def _check_revoked(self, serial: int) -> None:
        if serial in self._kit.revoked():
            raise Rejected("the certificate was revoked; ask the operator for a new kit", "revoked")

    def _remember(self, peer: str, said: Announcement) -> None:
        """Record an announcement on disk, so that a resumed run need not wait for every hospital."""
        self.announced[peer] = said
        sites = {name: found.model_dump(mode="json") for name, found in self.announced.items()}
        write_durably(self._record, json.dumps({"run": self._run, "sites": sites}).encode())

    def _in_session(self, peer: str, said: Session) -> _Session:
        with self._changed:
            session = self._sessions.get(peer)
            if session is None:
                raise Rejected("there is no such session; join again", "session")
            if not secrets.compare_digest(session.token.encode(), said.session.encode()):
                raise Rejected("another process of this hospital joined after this one", "replaced")
            session.connected = True
        try:
            self._check_revoked(session.serial)
        except Rejected:
            self._dismiss(peer, _REVOKED)
            raise
        return session

    def _next(self, peer: str, said: Session) -> Next:
        session = self._in_session(peer, said)
        with self._changed:
            if self._over is not None:
                session.heard_end = True
                self._changed.notify_all()
                return Next(over=self._over, follows=self._follows)
            work = self._work.get(peer)
            if work is None or work.answer is not None:
                return Next()
        task = work.task
        assert task.step is not None
        sizes = {name: path.stat().st_size for name, path in (task.received or {}).items()}
        return Next(
            task=TaskMessage(
                id=work.id, step=task.step, round=task.round, slot=task.slot, to=task.to, downloads=sizes
            )
        )

    def _current(self, peer: str, task: str) -> _Work:
        with self._changed:
            work = self._work.get(peer)
            if work is None or work.id != task or work.answer is not None:
                raise Rejected("the task is not current; its round went on", "stale")
            return work

    @contextmanager
    def _writing(self, peer: str, task: str) -> Iterator[_Work]:
        """Give the current task, to which no other request writes meanwhile.

        The engine then reads what `done` checked. Raises Rejected for a task that is not current.
        """
        with self._current(peer, task).writing:
            yield self._current(peer, task)

    def _read(self, peer: str, said: Slice) -> bytes:
        self._in_session(peer, said)
        path = self._current(peer, said.task).download(said.group)
        with path.open("rb") as file:
            file.seek(said.offset)
            return file.read(CHUNK)

    def _write(self, peer: str, said: Slice, body: bytes) -> Written:
        self._in_session(peer, said)
        with self._writing(peer, said.task) as work:
            path = work.upload(said.group)
            others = sum(size for name, size in work.received.items() if name != said.group)
            if said.offset + len(body) > said.total:
                raise Rejected(f"the chunk ends behind the upload's {said.total} bytes")
            if said.total + others > self._limits.upload_bytes:
                reason = f"its upload has more than the {self._limits.upload_bytes} bytes that a round allows"
                with self._changed:
                    # The same step would have the same size.
                    work.answer = Failure(peer, reason)
                    self._changed.notify_all()
                raise Rejected(reason, "too large")
            at = 0 if said.offset == 0 else work.received.get(said.group, 0)
            if said.offset == at:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("r+b" if path.exists() else "wb") as file:
                    file.truncate(at)
                    file.seek(at)
                    file.write(body)
                at += len(body)
            work.received[said.group] = at
        return Written(at=at)

    def _done(self, peer: str, said: Report) -> None:
        self._in_session(peer, said)
        with self._writing(peer, said.task) as work:
            answer = self._delivery(work, said) if said.failure is None else None
            with self._changed:
                if work.answer is None:
                    work.answer = answer or Failure(peer, printable(said.failure or "no reason was given"))
                    self._changed.notify_all()

    def _delivery(self, work: _Work, said: Report) -> Delivery | Failure:
        """Check a report against the plan and its files against their headers, before a tensor is read."""
        task, declared = work.task, {group.name: group for group in work.phase.uploads}
        essential = {name for name, group in declared.items() if group.essential}
        if {*said.groups} | {*said.withheld} - {"metrics"} != {*declared} or not essential <= {*said.groups}:
            return Failure(task.site, f"expected the groups {', '.join(declared)}, or a note that one stays")
        if said.slot not in {task.slot, task.to}:
            return Failure(task.site, f"expected memory slot {task.slot} or {task.to}, found {said.slot}")
        unknown = {name.partition("/")[2] for name in said.metrics} - {"", *self._labels}
        if unknown:
            return Failure(
                task.site, f"expected metrics of the task's labels, found {printable(min(unknown))!r}"
            )
        files = {name: work.upload(name) for name in said.groups}
        sent: dict[str, int] = {}
        for name, path in files.items():
            if not path.exists() or path.stat().st_size != work.received.get(name, -1):
                return Failure(task.site, f"group '{name}' was not uploaded completely")
            try:
                sent[name] = check_tensors(path)
            except TrainingError as error:
                return Failure(task.site, f"group '{name}': {error}")
        privacy = {name: Spent(**cost.model_dump()) for name, cost in said.privacy.items() if name in files}
        return Delivery(
            task.site, files, sent, said.weight, said.metrics, said.withheld, said.slot, said.seconds, privacy
        )

    def _leave(self, peer: str, said: Leave) -> None:
        self._in_session(peer, said)
        self._dismiss(peer, f"left the run: {printable(said.reason)}")

    def _dismiss(self, peer: str, reason: str) -> None:
        """Go on without a hospital until it joins again."""
        with self._changed:
            self._left[peer] = reason
            self._sessions.pop(peer, None)
            work = self._work.get(peer)
            if work is not None and work.answer is None:
                work.answer = Failure(peer, reason)
            self._changed.notify_all()
        self.warn(f"{peer}: {reason}")

    def _disconnected(self, peer: str) -> None:
        with self._changed:
            if peer in self._sessions:
                self._sessions[peer].connected = False
            self._changed.notify_all()

    def _wake(self, *sites: str) -> None:
        for site in sites or tuple(self._sessions):
            if site in self._sessions:
                self._cell.notify("wake", site)

    def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        with self._changed:
            while not condition() and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)


def _remote(name: str, said: Announcement) -> RemoteSite:
    return RemoteSite(name, said.digest, said.splits_digest, SiteCounts(said.files, said.patients))


def network_id(
    method: str, config: MethodConfig, settings: RunConfig, task: ModelTask, sites: Sequence[str]
) -> str:
    """A short name for the run's folder, which is known before the hospitals join.

    It depends on the hospitals that take part, not on the names of those that are left out.
    """
    content = settings.model_copy(update={"leave_out": ()}).model_dump(mode="json")
    digest = configuration_digest(method, config, content, task)
    return "network-" + hashlib.sha256("\0".join((digest, *sorted(sites))).encode()).hexdigest()[:16]


def run_to_resume(
    kit: Kit, folder: Path | None, folders: Path, sites: Sequence[str], id_of: Callable[[Sequence[str]], str]
) -> tuple[Path, tuple[str, ...]]:
    """Find the run to resume: its folder and its hospitals, which are `sites` and those revoked since.

    It is looked for in `folder` if the operator named one, otherwise among the runs in `folders` of which the
    hospitals and the settings give the folder's name (`id_of`). Without such a run, a new one begins.
    Raises ConfigurationError, which lists the runs found, when none or several have these hospitals.
    """
    own = folder or folders / id_of(sites)
    places = sorted(folders.glob("network-*")) if folder is None else [folder]
    joined = {place: names for place in places if (names := _joined(place))}
    if folder is None:
        joined = {place: names for place, names in joined.items() if id_of(names) == place.name}
    possible = {*sites} | kit.revoked_sites()
    fitting = {place: names for place, names in joined.items() if {*sites} <= {*names} <= possible}
    if own in fitting:
        return own, fitting[own]
    if not joined or (own not in joined and (own / NETWORK_FILE).exists()):
        return own, tuple(sites)
    if len(fitting) == 1:
        return next(iter(fitting.items()))
    raise ConfigurationError(
        f"expected one run of {', '.join(sites)} to resume, found",
        [
            *(f"{place}: a run of {', '.join(names)}" for place, names in joined.items()),
            "name hospitals that came later with --leave-out, choose a run with --run, or begin a new one "
            "without --resume",
        ],
    )


def _joined(folder: Path) -> tuple[str, ...]:
    """The hospitals of a run with a checkpoint, before which all of them joined; none of another folder."""
    record = folder / NETWORK_FILE
    if not record.exists() or RunFolder(folder).checkpoint() is None:
        return ()
    return tuple(sorted(json.loads(record.read_text())["sites"]))
