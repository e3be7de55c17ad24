"""`locum site check`: the steps before a run at a hospital, what is wrong, and what to do.

It joins no run, and sends nothing. With kit, data and policy it looks at these too; with the task, it reads
the data as a run does, and trains one step.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch
import typer

from model_store.errors import LocumStoreError
from model_store.task import Task
from training.choices.fedavg import FedAvgConfig
from training.config import RunConfig
from training.data.cases import Federation, data_warnings
from training.data.federation import load_site
from training.engine.device import default_workers, fault_of, free_memory, problem_of
from training.errors import ConfigurationError, TrainingError, no_network_engine
from training.network.handshake import refusal
from training.network.kits import Kit
from training.network.policy import Policy
from training.run import Run, execute

_GIB = 2**30
_LEAST_FREE_GIB = 2
# Those that gRPC obeys.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
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
    """What the hospital would take part with; None of what was not given. `task` is the operator's file."""

    kit: Path | None = None
    data: Path | None = None
    policy: Path | None = None
    state: Path | None = None
    device: str | None = None
    task: Path | None = None

    @property
    def state_folder(self) -> Path:
        """Where a run keeps what stays."""
        return self.state or (self.kit / "state" if self.kit else Path.cwd())

    @property
    def writable(self) -> Path:
        """That folder, or the nearest one above it that exists."""
        folder = self.state_folder
        while not folder.exists():
            folder = folder.parent
        return folder


def diagnose(hospital: Hospital, *, alone: bool = False) -> Iterator[Finding]:
    """Look at every part in turn; `alone` leaves out the operator, whom a hospital that asks reaches."""
    parts: Mapping[str, Callable[[Hospital], str]] = {
        "software": _software,
        "device": _device,
        "memory": _memory,
        "folders": _folders,
        "disk": _disk,
        "clock": _clock,
        "kit": _kit,
        "operator": _operator,
        "data": _data,
        "policy": _policy,
        "step": _step,
    }
    for part, look in parts.items():
        if alone and part in ("operator", "step"):
            continue
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
    if problem := problem_of(device) or fault_of(device):
        raise TrainingError(problem)
    if device != "cpu":
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


def _folders(hospital: Hospital) -> str:
    """Write a file where a run will write. Below the data nothing is written, so it may be read-only."""
    folder = hospital.writable
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise TrainingError(
            f"{folder} cannot be written to ({error.strerror}): give a folder that can, with --state"
        ) from error
    data = hospital.data
    if data is not None and hospital.state_folder.resolve().is_relative_to(data.resolve()):
        raise Warned(f"{hospital.state_folder} is in {data}: the data may become read-only; give --state")
    return f"{folder} can be written to"


def _disk(hospital: Hospital) -> str:
    folder = hospital.writable
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
    certificate = kit.certified()
    return (
        f"of '{kit.name}' in {kit.content.project}, complete and valid until {certificate.ends:%Y-%m-%d}, "
        f"certificate {certificate.fingerprint[:16]}"
    )


def _operator(hospital: Hospital) -> str:
    if hospital.kit is None:
        return "not looked at: give --kit"
    try:
        kit = Kit.open(hospital.kit, server=False)
        kit.check()
    except TrainingError as error:
        raise Warned("not looked at: its address is in the kit, which is wrong") from error
    address = kit.content.address
    try:
        why = refusal(kit)
    except OSError as error:
        named = (name for name in _PROXIES if os.environ.get(name))
        proxy = next((f"; gRPC goes through {name}, and this check does not" for name in named), "")
        raise Warned(
            f"{address} cannot be reached ({error}); a hospital waits for its operator{proxy}"
        ) from error
    if why is not None:
        raise TrainingError(why)
    return f"{address} takes this kit's certificate"


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
    if hospital.task is not None:
        return _read(hospital.data, hospital.task)
    words = ", ".join(f"{count} files in {name}/" for name, count in counts.items())
    if not any(counts.values()):
        raise ConfigurationError(
            f"{hospital.data} has no images", ["expected images/ and masks/, or a folder per class"]
        )
    if all((hospital.data / name / "images").is_dir() for name in counts):
        raise Warned(f"{hospital.data} looks like a federation's folder: give that of one hospital in it")
    return f"{words}; checked against the operator's task when the hospital joins, or with --task"


def _read(data: Path, task: Path) -> str:
    site = load_site(data, Task.load(task), data.name)
    drawn = ", ".join(f"{label} in {count}" for label, count in site.labelled.items())
    words = f"{site.size} cases of {len(site.patients)} patients{f' ({drawn})' if drawn else ''}"
    if warnings := data_warnings((site,)):
        raise Warned(f"{words}; {'; '.join(warnings)}")
    return words


def _step(hospital: Hospital) -> str:
    """Train one step of federated averaging on this hospital's own data, in a folder that goes again."""
    if hospital.data is None or hospital.task is None:
        return "not tried: give --data and --task"
    task, device = Task.load(hospital.task), hospital.device or "cpu"
    site = load_site(hospital.data, task, hospital.data.name)
    config = FedAvgConfig.model_validate({"rounds": 1, "local_steps": 1, "least_steps": 0})
    federation = Federation(hospital.data, task, (site,), False, site.digest)
    run, began = Run(federation, "fedavg", config, RunConfig(device=device)), time.monotonic()
    with tempfile.TemporaryDirectory(dir=hospital.writable) as folder:
        execute(run, Path(folder) / "run", workers=0)
    return (
        f"one step of fedavg on {device} took {time.monotonic() - began:.1f} s, reading and scoring included"
    )


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
