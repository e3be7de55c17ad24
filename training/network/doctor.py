"""`python -m training.site doctor`: what a hospital's machine has, what is wrong, and what to do.

It joins no run, and changes nothing. With kit, data and policy it looks at these too.
"""

from __future__ import annotations

import json
import platform
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch
import typer

from model_store.errors import LocumStoreError
from training.engine.device import default_workers, free_memory, problem_of
from training.errors import ConfigurationError, TrainingError, no_network_engine
from training.network.kits import Kit
from training.network.policy import Policy

_GIB = 2**30
_LEAST_FREE_GIB = 2
_CONNECT_SECONDS = 5
_LIBRARIES = ("locum", "torch", "monai", "nvflare", "pydicom")


@dataclass(frozen=True)
class Finding:
    """What was found of a part, in words. `wrong` keeps the hospital from a run; `warning` does not."""

    part: str
    state: Literal["ok", "warning", "wrong"]
    words: str


class Warned(Exception):
    """A part works, and a person should know more. `str` says what."""


@dataclass(frozen=True)
class Hospital:
    """What the hospital would take part with; None of what was not given."""

    kit: Path | None = None
    data: Path | None = None
    policy: Path | None = None
    state: Path | None = None
    device: str | None = None


def diagnose(hospital: Hospital) -> Iterator[Finding]:
    """Look at every part in turn."""
    parts: Mapping[str, Callable[[Hospital], str]] = {
        "software": _software,
        "device": _device,
        "memory": _memory,
        "disk": _disk,
        "clock": _clock,
        "kit": _kit,
        "operator": _operator,
        "data": _data,
        "policy": _policy,
    }
    for part, look in parts.items():
        try:
            yield Finding(part, "ok", look(hospital))
        except Warned as warned:
            yield Finding(part, "warning", str(warned))
        except (TrainingError, LocumStoreError) as error:
            yield Finding(part, "wrong", " ".join(str(error).split()))
        except Exception as error:  # a report says what it cannot find out, too
            yield Finding(part, "wrong", f"{type(error).__name__}: {error}")


def report(hospital: Hospital, as_json: bool) -> bool:
    """Print what was found of every part, as text or JSON by lines. Returns whether anything is wrong."""
    wrong = False
    for found in diagnose(hospital):
        typer.echo(json.dumps(asdict(found)) if as_json else f"{found.state:8}{found.part:10}{found.words}")
        wrong |= found.state == "wrong"
    return wrong


def _software(_: Hospital) -> str:
    found = [f"Python {platform.python_version()}", platform.machine()]
    for name in _LIBRARIES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError as error:
            if name == "nvflare":
                raise no_network_engine(error) from error
            continue
    return ", ".join(found)


def _device(hospital: Hospital) -> str:
    device = hospital.device or "cpu"
    if problem := problem_of(device):
        raise TrainingError(problem)
    if device != "cpu":
        # A card that torch has no code for is found by a kernel alone.
        torch.ones(2, device=device).sum().item()
        return f"{device}: {torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if cards and hospital.device is None:
        raise Warned(f"the operator's device by default; this machine has {cards} GPU: give --device cuda")
    return (
        "cpu" if hospital.device else "the operator's by default; this machine has no GPU that torch can use"
    )


def _memory(hospital: Hospital) -> str:
    device = hospital.device or "cpu"
    if problem_of(device):
        raise Warned(f"none on {device}, which is not there")
    place = "on the CPU" if device == "cpu" else f"on {device}"
    workers = default_workers(device)
    return f"{free_memory(device) / _GIB:.1f} GiB are free {place}, for {workers} worker processes by default"


def _disk(hospital: Hospital) -> str:
    folder = hospital.state or (hospital.kit / "state" if hospital.kit else Path.cwd())
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / _GIB
    words = f"{free:.1f} GiB are free in {folder}"
    if free < _LEAST_FREE_GIB:
        raise Warned(f"{words}: free some space for memories and transfers")
    return words


def _clock(_: Hospital) -> str:
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC; certificates are valid by it"


def _kit(hospital: Hospital) -> str:
    if hospital.kit is None:
        return "not looked at: give --kit"
    kit, now = Kit.open(hospital.kit, server=False), datetime.now(UTC)
    kit.check(now)
    if warning := kit.warning(now):
        raise Warned(warning)
    return f"of '{kit.name}' in {kit.content.project}, complete and valid"


def _operator(hospital: Hospital) -> str:
    if hospital.kit is None:
        return "not looked at: give --kit"
    try:
        address = Kit.open(hospital.kit, server=False).content.address
    except ConfigurationError as error:
        raise Warned("not looked at: its address is in the kit, which is wrong") from error
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise Warned(f"{address} cannot be reached ({error}); a hospital waits for its operator") from error
    return f"{address} takes connections"


def _data(hospital: Hospital) -> str:
    if hospital.data is None:
        return "not looked at: give --data"
    if not hospital.data.is_dir():
        raise ConfigurationError(
            f"{hospital.data} is not a folder", ["expected images/ and masks/, or a folder per class"]
        )
    counts = {
        folder.name: sum(path.is_file() for path in folder.iterdir())
        for folder in sorted(hospital.data.iterdir())
        if folder.is_dir()
    }
    words = ", ".join(f"{count} files in {name}/" for name, count in counts.items())
    if not any(counts.values()):
        raise ConfigurationError(
            f"{hospital.data} has no images", ["expected images/ and masks/, or a folder per class"]
        )
    return f"{words}; checked against the operator's task when the hospital joins"


def _policy(hospital: Hospital) -> str:
    if hospital.policy is None:
        return "not looked at: give --policy"
    policy = Policy.read(hospital.policy)
    if not policy.takes_part:
        raise Warned(f"{hospital.policy} says takes_part: false; the hospital sends nothing")
    words = f"{hospital.policy} lets {', '.join(policy.allows) or 'nothing'} leave"
    if policy.privacy is not None and "weights" in policy.privacy.kinds:
        return f"{words}, weights with noise alone, which keeps this hospital's own model here"
    consents = "consents" if policy.consents else "does not consent"
    return f"{words}, and {consents} to the export of this hospital's own model"
