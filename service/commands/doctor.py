"""`python -m service doctor`: what this machine has, what the service will use, what is wrong and what to do.

It starts nothing and changes nothing.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Literal

import typer
from redis import Redis

from model_store.errors import LocumStoreError
from service.about import locum_version
from service.database import Database, check, database_now
from service.errors import DatabaseNotMigrated, ServiceError
from service.inference.gpu import card
from service.inference.providers import CPU, FALLBACK, OPENVINO, cuda_device_seen
from service.inference.sessions import probe_provider
from service.settings import Settings, graph_limits, ignored_variables
from service.watch.messages import undelivered

_GIB = 2**30
_LEAST_FREE_GIB = 2
_MOST_SECONDS_APART = 2.0
# The first use of CUDA may compile kernels for a new card.
_JOBS_SECONDS = 300
_LIBRARIES = ("torch", "onnxruntime-gpu", "onnxruntime", "monai", "pydicom")


@dataclass(frozen=True)
class Finding:
    """What was found of a part, in words. `wrong` keeps the service from its work; `warning` does not."""

    part: str
    state: Literal["ok", "warning", "wrong"]
    words: str


class Warned(Exception):
    """A part works, and a person should know more. `str` says what."""


def diagnose(settings: Settings) -> Iterator[Finding]:
    """Look at every part in turn."""
    parts: Mapping[str, Callable[[Settings], str]] = {
        "software": _software,
        "settings": _settings,
        "device of scans": _scans,
        "device of jobs": _jobs,
        "memory": _memory,
        "disk": _disk,
        "store": _store,
        "files": _files,
        "database": _database,
        "clock": _clock,
        "redis": _redis,
        "pacs": _pacs,
        "webhooks": _webhooks,
    }
    for part, look in parts.items():
        try:
            yield Finding(part, "ok", look(settings))
        except Warned as warned:
            yield Finding(part, "warning", str(warned))
        except (ServiceError, LocumStoreError) as error:
            yield Finding(part, "wrong", str(error))
        except Exception as error:  # a report says what it cannot find out, too
            yield Finding(part, "wrong", f"{type(error).__name__}: {error}")


def report(settings: Settings, as_json: bool) -> bool:
    """Print what was found of every part, as text or JSON by lines. Returns whether anything is wrong."""
    wrong = False
    for found in diagnose(settings):
        typer.echo(json.dumps(asdict(found)) if as_json else f"{found.state:8}{found.part:17}{found.words}")
        wrong |= found.state == "wrong"
    return wrong


def _software(_: Settings) -> str:
    found = [f"Locum {locum_version()}", f"Python {platform.python_version()}", platform.machine()]
    for name in _LIBRARIES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def _settings(_: Settings) -> str:
    if lines := ignored_variables():
        raise Warned("; ".join(lines))
    return "every variable LOCUM_... is a setting"


def _scans(settings: Settings) -> str:
    provider = probe_provider(settings.device)
    if provider == CPU:
        if settings.device == "auto" and cuda_device_seen():
            raise Warned(FALLBACK)
        return f"LOCUM_DEVICE={settings.device}: the CPU" + (
            "" if cuda_device_seen() else "; no NVIDIA device"
        )
    if provider == OPENVINO:
        return f"LOCUM_DEVICE={settings.device}: the CPU, by OpenVINO"
    return f"LOCUM_DEVICE={settings.device}: {card(settings.device) or 'a GPU'}"


def _jobs(settings: Settings) -> str:
    if find_spec("torch") is None:
        return "none: torch is not installed here, so jobs wait for a worker elsewhere"
    # The worker's half, which imports torch.
    done = subprocess.run(
        [sys.executable, "-m", "service.worker.device"],
        capture_output=True,
        text=True,
        timeout=_JOBS_SECONDS,
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode:
        raise ServiceError(said[-1] if said else f"the check of torch ended with {done.returncode}")
    found = json.loads(done.stdout.splitlines()[-1])
    words = f"{found.get('card', found['device'])}, torch {found['torch']}"
    if found["device"] == "cpu" and settings.device == "auto" and cuda_device_seen():
        raise Warned(f"{words}: " + " ".join(said))
    if found["device"] != "cpu":
        words += f", CUDA {found['cuda']}, cuDNN {found['cudnn']}"
    return words


def _memory(settings: Settings) -> str:
    return f"networks on the CPU may use {graph_limits(settings).memory / _GIB:.1f} GiB"


def _disk(settings: Settings) -> str:
    folder = settings.state_dir
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / _GIB
    words = f"{free:.1f} GiB are free for {settings.state_dir}"
    if free < _LEAST_FREE_GIB:
        raise Warned(f"{words}: free some space")
    return words


def _store(settings: Settings) -> str:
    store = settings.open_store()
    store.check()
    names = store.versions.names()
    if not names:
        raise Warned(f"{settings.store} is empty: publish a model (`python -m training.federate`)")
    return f"{settings.store} has {len(names)} names"


def _files(settings: Settings) -> str:
    if settings.files is None:
        return f"in {settings.state_dir}"
    files = settings.open_files()
    files.check()
    return f"{files.location} answers"


def _database(settings: Settings) -> str:
    if settings.database_url is None and not (settings.state_dir / "locum.db").exists():
        return f"none yet; the service makes one in {settings.state_dir}"
    database = Database(settings.resolved_database_url)
    try:
        check(database)
    except DatabaseNotMigrated as error:
        raise Warned(f"{error} (a start of the service migrates it)") from error
    finally:
        database.dispose()
    return "migrated and readable"


def _clock(settings: Settings) -> str:
    if settings.database_url is None:
        return f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC; the database is on this machine"
    database = Database(settings.resolved_database_url)
    try:
        with database.read() as session:
            apart = abs((database_now(session) - datetime.now(UTC)).total_seconds())
    finally:
        database.dispose()
    if apart > _MOST_SECONDS_APART:
        raise Warned(
            f"this clock and the database's are {apart:.0f} s apart: let both follow one time server"
        )
    return f"{apart:.1f} s from the database's"


def _redis(settings: Settings) -> str:
    if settings.redis_url is None:
        return "embedded: started with the service"
    client = Redis.from_url(settings.redis_url.get_secret_value(), socket_connect_timeout=5, socket_timeout=5)
    try:
        client.ping()
    finally:
        client.close()
    return "answers"


def _pacs(settings: Settings) -> str:
    return "none" if settings.pacs is None else f"{settings.pacs} is valid"


def _webhooks(settings: Settings) -> str:
    if not settings.webhooks:
        return "none"
    hosts = ", ".join(each.host for each in settings.webhooks)
    if settings.database_url is None and not (settings.state_dir / "locum.db").exists():
        return f"{hosts}; nothing was sent yet"
    database = Database(settings.resolved_database_url)
    try:
        check(database)
        with database.read() as session:
            found = undelivered(session, settings.webhooks)
    except DatabaseNotMigrated as error:
        raise Warned(f"{hosts}; what was received is known once the database is migrated") from error
    finally:
        database.dispose()
    if found:
        said = "; ".join(map(str, found))
        raise Warned(f"{said}: the service's log says why, and it is tried again for three days")
    return f"{hosts}; no message waits after two attempts"
