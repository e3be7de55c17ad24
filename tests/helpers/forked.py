"""Programs in processes that are forked from one that has imported what they import.

A process that is started by its command imports torch, MONAI and NVFLARE for seconds, which is most of what a
test with several processes costs. A forked one is the same program from its `main` on, and is killed,
stopped and waited for as any other.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest.mock import patch

from training.processes import PRELOADED

# A server of its own: the one of a run may have been started for other imports. Absent packages are ignored.
_SERVER = forkserver.ForkServer()
_SERVER.set_forkserver_preload(
    [
        *PRELOADED,
        "onnx",
        "torch.onnx",
        "training.command",
        "training.network.joining",
        "training.network.operator",
        "nvflare.fuel.f3.cellnet.core_cell",
        "nvflare.lighter.utils",
        "tests.helpers.training.killing",
    ]
)


def fork(target: Callable[..., None], *arguments: object) -> Any:
    """Start a process that has made the imports; `target` is found by its name."""
    process = multiprocessing.get_context("forkserver").Process(target=target, args=arguments)
    with patch.object(forkserver, "connect_to_new_process", _SERVER.connect_to_new_process):
        process.start()
    return process


class Forked:
    """`python -m MODULE OPTIONS…`, as a `subprocess.Popen` of which both outputs are appended to a file."""

    def __init__(
        self,
        module: str,
        options: Sequence[object],
        log: Path,
        environment: Mapping[str, str],
    ) -> None:
        self._process = fork(_main, module, [*map(str, options)], log, dict(environment))

    @property
    def pid(self) -> int:
        """The process id."""
        return int(self._process.pid)

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _main(module: str, options: list[str], log: Path, environment: dict[str, str]) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    # A shell that runs the tests in its background ignores SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [module, *options]
    with warnings.catch_warnings():
        # That the module was imported before.
        warnings.simplefilter("ignore", RuntimeWarning)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
