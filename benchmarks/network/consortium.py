"""A consortium on loopback: kits, hospitals and an operator as real processes that can be killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol

from locum.demo.service_process import free_port
from training.network import kits

# What is waited for ends the wait: the bound only turns a hang into a failure, on a slow machine, too.
PATIENCE_S = 180.0
POLICY = "allows: [weights, features, statistics, images]\nconsents: true\n"


class Process(Protocol):
    """What a member needs of its process, as of a `subprocess.Popen`."""

    @property
    def pid(self) -> int:
        """The process id."""

    def poll(self) -> int | None:
        """The exit code, None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code."""

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless it has ended."""

    def kill(self) -> None:
        """Send SIGKILL."""


@dataclass
class Member:
    """A process and the file with its output."""

    process: Process
    log: Path

    def text(self) -> str:
        """Read what the process printed."""
        return self.log.read_text(errors="replace")

    def wait_for(self, words: str, seconds: float = PATIENCE_S, after: int = 0) -> int:
        """Wait until `words` are printed beyond offset `after`; returns the offset behind them."""
        end = time.monotonic() + seconds
        while (at := self.text().find(words, after)) < 0:
            if self.process.poll() is not None and self.text().find(words, after) < 0:
                raise RuntimeError(f"the process ended without '{words}':\n{self.text()}")
            if time.monotonic() > end:
                raise TimeoutError(f"no '{words}' within {seconds} s:\n{self.text()}")
            time.sleep(0.02)
        return at + len(words)

    def kill(self) -> None:
        """Kill the process as a power cut would."""
        self.process.kill()
        self.process.wait()

    def end(self, seconds: float = PATIENCE_S) -> int:
        """Wait for the process to end; returns its exit code."""
        return self.process.wait(seconds)


@dataclass
class Consortium:
    """Kits for `sites` under `root`, and commands to start the members. `data` is a federation's folder.

    `begin` starts `python -m MODULE OPTIONS…` with its output appended to a file, and an environment.
    """

    root: Path
    data: Path
    sites: Sequence[str]
    port: int = 0
    begin: Callable[[str, Sequence[object], Path, Mapping[str, str]], Process] | None = None
    members: list[Member] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.port = self.port or free_port()
        kits.provision(self.root / "kits", "loopback", f"localhost:{self.port}", self.sites)
        for site in self.sites:
            (self.root / f"{site}.yaml").write_text(POLICY)

    def __enter__(self) -> Consortium:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for member in self.members:
            if member.process.poll() is None:
                member.kill()

    def policy(self, site: str, text: str) -> None:
        """Replace a hospital's policy."""
        (self.root / f"{site}.yaml").write_text(text)

    def start_site(
        self,
        site: str,
        module: str = "training.site",
        state: Path | None = None,
        more: Sequence[object] = (),
    ) -> Member:
        """Start a hospital's process, with its own state folder or another, and more options."""
        return self.start(
            f"{site}.log",
            module,
            *("--data", self.data / site),
            *("--kit", self.root / "kits" / site),
            *("--policy", self.root / f"{site}.yaml"),
            *("--state", state or self.root / "state" / site),
            *more,
        )

    def start_operator(self, *options: object) -> Member:
        """Start the operator's process."""
        return self.start(
            "operator.log",
            "training.federate",
            *("--engine", "network", "--kit", self.root / "kits" / "server"),
            *("--task", self.data / "task.yaml", "--out", self.root / "store", "--run", self.root / "run"),
            *options,
        )

    def start(self, log: str, module: str, *options: object) -> Member:
        """Start a process of a module; its output is appended to `log`."""
        path = self.root / log
        path.touch()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        member = Member((self.begin or by_command)(module, options, path, environment), path)
        self.members.append(member)
        return member


def by_command(
    module: str, options: Sequence[object], log: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a process by its command."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", module, *map(str, options)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )


def until(condition: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    """Wait for a condition. Raises TimeoutError."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the condition did not come true")
        time.sleep(0.05)
