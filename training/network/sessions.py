"""Which hospitals take part in a run at this moment, and which left it."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from training.network.cell import Rejected
from training.network.messages import Next


@dataclass
class OpenSession:
    """The process of a hospital that joined last.

    `serial` is the number of its certificate, `heard` when its last request came, by the monotonic clock.
    `beats` says that it is one that speaks while it computes.
    """

    token: str
    serial: int
    connected: bool = True
    heard: float = field(default_factory=time.monotonic)
    beats: bool = False
    heard_end: bool = False


class Sessions:
    """One session of each hospital that joined, and the reason of each that left since.

    `changed` is the operator's lock: it guards everything here, and is notified of every change. `left` are
    hospitals that left before the run goes on; `wake` tells one that there is something to ask for.
    """

    def __init__(
        self, changed: threading.Condition, left: Mapping[str, str], wake: Callable[[str], None]
    ) -> None:
        self._changed = changed
        self._left = dict(left)
        self._wake = wake
        self._open: dict[str, OpenSession] = {}
        self._last: Next | None = None

    def open(self, site: str, serial: int) -> str:
        """Open a hospital's session, in place of the one before; returns its token."""
        with self._changed:
            token = secrets.token_hex(32)
            self._open[site] = OpenSession(token, serial)
            self._left.pop(site, None)
            self._changed.notify_all()
            return token

    def get(self, site: str, token: str) -> OpenSession:
        """Return a hospital's session, which is connected again. Raises Rejected for another token."""
        with self._changed:
            session = self._open.get(site)
            if session is None:
                raise Rejected("there is no such session; join again", "session")
            if not secrets.compare_digest(session.token.encode(), token.encode()):
                raise Rejected("another process of this hospital joined after this one", "replaced")
            session.connected = True
            session.heard = time.monotonic()
            return session

    def disconnected(self, site: str) -> None:
        """Note that a hospital lost its connection."""
        with self._changed:
            if site in self._open:
                self._open[site].connected = False
            self._changed.notify_all()

    def dismiss(self, site: str, reason: str) -> None:
        """Go on without a hospital until it joins again."""
        with self._changed:
            self._left[site] = reason
            self._open.pop(site, None)
            self._changed.notify_all()

    def why_left(self, site: str) -> str | None:
        """Why a hospital left, if it has not joined again."""
        with self._changed:
            return self._left.get(site)

    def connected(self) -> frozenset[str]:
        """The hospitals that are connected."""
        with self._changed:
            return frozenset(site for site, session in self._open.items() if session.connected)

    def beat(self, site: str) -> None:
        """Note that a hospital speaks while it computes, so that its silence says something."""
        with self._changed:
            if session := self._open.get(site):
                session.beats = True

    def silence(self, site: str, since: float) -> float:
        """For how many seconds a hospital was not heard, since an instant of the monotonic clock at most.

        Zero where it is connected and is one that does not speak while it computes.
        """
        with self._changed:
            session = self._open.get(site)
            if session is not None and session.connected and not session.beats:
                return 0.0
            return time.monotonic() - max(since, session.heard if session else since)

    def wake(self, *sites: str) -> None:
        """Wake these hospitals, or all, as far as they have a session."""
        with self._changed:
            found = [site for site in sites or self._open if site in self._open]
        for site in found:
            self._wake(site)

    def end(self, last: Next, patience: float = 0.0) -> None:
        """Say that the run is over to every hospital that asks for a task.

        Waits `patience` seconds at most for those that are connected to hear it.
        """
        with self._changed:
            self._last = last
            self._changed.notify_all()
        self.wake()
        until = time.monotonic() + patience
        with self._changed:
            while any(s.connected and not s.heard_end for s in self._open.values()):
                if (left := until - time.monotonic()) <= 0:
                    return
                self._changed.wait(left)

    def last_message(self, session: OpenSession) -> Next | None:
        """The end of the run, once it is over; the hospital of this session has then heard it."""
        with self._changed:
            if self._last is not None:
                session.heard_end = True
                self._changed.notify_all()
            return self._last
