"""A real redis-server, really killed."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from service.errors import BrokerError
from service.runtime.broker import Broker, redis_server, socket_path
from service.settings import Settings

pytestmark = pytest.mark.process


@pytest.fixture
def make() -> Iterator[Callable[[Path], Broker]]:
    """`make(state_dir)`: a broker that is stopped at the end."""
    made: list[Broker] = []

    def build(state_dir: Path) -> Broker:
        made.append(Broker(Settings(state_dir=state_dir, redis_url=None)))
        return made[-1]

    yield build
    for broker in made:
        broker.stop()


def owns(broker: Broker) -> bool:
    """Whether the running Redis is the broker's child."""
    return broker._child is not None and broker._child.alive


def server_of(broker: Broker) -> int:
    pid = broker.client.info("server")["process_id"]
    assert isinstance(pid, int)
    return pid


def test_brokers_of_one_state_folder_share_one_redis(make: Callable[[Path], Broker], tmp_path: Path) -> None:
    first, second = make(tmp_path), make(tmp_path)
    first.start()
    second.start()
    assert (owns(first), owns(second)) == (True, False)
    assert server_of(first) == server_of(second)
    assert stat.S_IMODE(socket_path(tmp_path).stat().st_mode) == 0o700
    assert first.client.config_get("port") == {"port": "0"}


def test_second_start_of_a_broker_keeps_its_server(make: Callable[[Path], Broker], tmp_path: Path) -> None:
    broker = make(tmp_path)
    broker.start()
    before = server_of(broker)
    broker.start()
    assert server_of(broker) == before


def test_queue_survives_sigkill_of_redis(make: Callable[[Path], Broker], tmp_path: Path) -> None:
    owner, other = make(tmp_path), make(tmp_path)
    owner.start()
    owner.client.rpush("queue", "a job")
    # `everysec`: on disk within a second or so; WAITAOF would say when, from Redis 7 on.
    owner.client.config_set("appendfsync", "always")
    owner.client.rpush("queue", "another")
    killed = server_of(owner)
    os.kill(killed, signal.SIGKILL)
    other.start()
    assert other.client.lrange("queue", 0, -1) == [b"a job", b"another"]
    assert server_of(other) != killed
    # The first owner goes: the new server is not its own, and stays.
    owner.stop()
    assert other.client.ping()


def test_broker_starts_with_a_stale_socket_and_a_truncated_log(
    make: Callable[[Path], Broker], tmp_path: Path
) -> None:
    broker = make(tmp_path)
    broker.start()
    broker.client.rpush("queue", "a job")
    os.kill(server_of(broker), signal.SIGKILL)
    broker.stop()
    assert socket_path(tmp_path).exists()
    (log,) = (tmp_path / "redis" / "appendonlydir").glob("*.incr.aof")
    log.write_bytes(log.read_bytes() + b"*3\r\n$5\r\nRPU")
    again = make(tmp_path)
    again.start()
    assert again.client.lrange("queue", 0, -1) == [b"a job"]


def test_queue_of_redis_6_is_read(make: Callable[[Path], Broker], tmp_path: Path) -> None:
    """An earlier Locum kept its queue in one file."""
    words = (b"RPUSH", b"queue", b"a job")
    folder = tmp_path / "redis"
    folder.mkdir()
    (folder / "appendonly.aof").write_bytes(
        b"*3\r\n" + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words)
    )
    broker = make(tmp_path)
    broker.start()
    assert broker.client.lrange("queue", 0, -1) == [b"a job"]


def test_stop_ends_the_redis_server(make: Callable[[Path], Broker], tmp_path: Path) -> None:
    broker = make(tmp_path)
    broker.start()
    server = psutil.Process(server_of(broker))
    broker.stop()
    assert not server.is_running()
    assert not socket_path(tmp_path).exists()


def test_concurrently_started_processes_share_one_redis(
    make: Callable[[Path], Broker], tmp_path: Path
) -> None:
    program = (
        "import sys; from pathlib import Path; from service.runtime.broker import Broker\n"
        "from service.settings import Settings\n"
        "broker = Broker(Settings(state_dir=Path(sys.argv[1]), redis_url=None))\n"
        "sys.stdin.readline(); broker.start(); print(broker._child is not None, flush=True)\n"
        "sys.stdin.read(); broker.stop()"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for child in children:
        assert child.stdin is not None
        child.stdin.write("now\n")
        child.stdin.flush()
    owned = [child.stdout.readline().strip() for child in children if child.stdout is not None]
    for child in children:
        child.communicate()
    assert sorted(owned) == ["False", "False", "True"]


def owner_of(state_dir: Path, **environment: str) -> tuple[subprocess.Popen[str], psutil.Process]:
    """A process that owns a Redis, and the server."""
    program = (
        "import sys, time; from pathlib import Path; from service.runtime.broker import Broker\n"
        "from service.settings import Settings\n"
        "broker = Broker(Settings(state_dir=Path(sys.argv[1]), redis_url=None))\n"
        "broker.start(); print(broker.client.info('server')['process_id'], flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(state_dir)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    assert owner.stdout is not None
    return owner, psutil.Process(int(owner.stdout.readline()))


def test_redis_that_outlived_its_owner_and_its_watcher_is_replaced(
    make: Callable[[Path], Broker], tmp_path: Path
) -> None:
    # Where the kernel gives no signal: setpriv is not found.
    owner, server = owner_of(tmp_path, PATH=str(tmp_path))
    for watcher in server.children():
        watcher.kill()
    owner.kill()
    owner.communicate()
    with pytest.raises(psutil.TimeoutExpired):
        server.wait(1)
    broker = make(tmp_path)
    broker.client.lpush("celery", "a job")
    broker.start()
    assert owns(broker)
    assert server_of(broker) != server.pid
    assert broker.client.lrange("celery", 0, -1) == [b"a job"]


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="NOT TESTED: setpriv is not installed")
def test_redis_ends_when_its_watcher_and_then_its_owner_are_killed(tmp_path: Path) -> None:
    owner, server = owner_of(tmp_path)
    for watcher in server.children():
        watcher.kill()
    owner.kill()
    owner.communicate()
    server.wait(20)


def test_redis_ends_when_its_owner_is_killed(make: Callable[[Path], Broker], tmp_path: Path) -> None:
    owner, server = owner_of(tmp_path)
    owner.kill()
    owner.communicate()
    server.wait(20)
    survivor = make(tmp_path)
    survivor.start()
    assert owns(survivor)


def test_hanging_redis_is_reported_and_not_started_twice(
    make: Callable[[Path], Broker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, other = make(tmp_path), make(tmp_path)
    broker.start()
    server = psutil.Process(server_of(broker))
    server.suspend()
    monkeypatch.setattr("service.runtime.broker._START_SECONDS", 0.1)
    try:
        with pytest.raises(BrokerError, match="if it hangs, kill it"):
            other.start()
        assert not owns(other)
    finally:
        server.resume()


def test_long_state_folder_gets_a_short_socket_path(
    make: Callable[[Path], Broker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="l", dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        state = tmp_path / ("long" * 25)
        path = socket_path(state)
        assert len(os.fsencode(path)) <= 103
        assert path == socket_path(state)
        assert path != socket_path(tmp_path / ("lang" * 25))
        first, second = make(state), make(state)
        first.start()
        second.start()
        assert (owns(first), owns(second)) == (True, False)
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        first.stop()


def test_socket_folder_writable_by_others_is_rejected(
    make: Callable[[Path], Broker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="l", dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        state = tmp_path / ("long" * 25)
        trap = socket_path(state).parent
        trap.mkdir()
        trap.chmod(0o777)
        with pytest.raises(BrokerError, match="only this user can write to"):
            make(state).start()


def test_unreachable_external_redis_error_hides_the_password() -> None:
    broker = Broker(Settings(redis_url="redis://:open-sesame@127.0.0.1:1/0"))  # type: ignore[arg-type]
    with pytest.raises(BrokerError, match="LOCUM_REDIS_URL") as refused:
        broker.start()
    assert "open-sesame" not in str(refused.value)
    broker.stop()


def test_external_redis_is_used_and_not_stopped(make: Callable[[Path], Broker], tmp_path: Path) -> None:
    there = make(tmp_path)
    there.start()
    broker = Broker(Settings(redis_url=there.url))  # type: ignore[arg-type]
    broker.start()
    assert (broker.embedded, owns(broker)) == (False, False)
    assert broker.celery_url == f"redis+socket://{socket_path(tmp_path)}"
    broker.stop()
    assert there.client.ping()


@pytest.mark.parametrize("url", ["redis://h:6379/1", "rediss://h/0"])
def test_celery_url_equals_other_redis_urls(url: str) -> None:
    assert Broker(Settings(redis_url=url)).celery_url == url  # type: ignore[arg-type]


def test_redis_server_falls_back_to_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundled = redis_server()
    monkeypatch.setattr("service.runtime.broker.find_spec", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BrokerError, match="found none"):
        redis_server()
    (tmp_path / "redis-server").symlink_to(bundled)
    assert redis_server() == tmp_path / "redis-server"
