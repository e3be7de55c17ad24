"""Programs in processes that are forked from one that has imported what they import.

A process that is started by its command imports torch, MONAI and Celery for seconds, longer on busy cores.
That is most of what a measurement or a test with several processes costs, and it measures nothing of Locum.
A forked one is the same program from its `main` on, and is killed, stopped and waited for as any other. All
are forked from one process, from which runs fork their workers, too.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from training.processes import PRELOADED, process_context

PRELOADED.insert(0, "benchmarks.harness.preload")


def fork(
    target: Callable[..., None], *arguments: object, environment: Mapping[str, str] | None = None
) -> BaseProcess:
    """Start a process that has made the imports; `target` is found by its name.

    Its environment is this process's as it is now when None is given.
    """
    begun = (dict(os.environ if environment is None else environment), target, arguments)
    process = process_context().Process(target=_begin, args=begun)
    process.start()
    return process


class Forked:
    """`python -m MODULE OPTIONS…` in a session of its own, as a `subprocess.Popen`.

    Both outputs are appended to a file.
    """

    def __init__(
        self, module: str, options: Sequence[object], log: Path, environment: Mapping[str, str]
    ) -> None:
        self._process = fork(_main, module, [*map(str, options)], (log, log), environment=environment)

    @property
    def pid(self) -> int:
        """The process id."""
        return _pid(self._process)

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        return self._process.exitcode

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


def run(
    module: str, *options: object, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of `python -m MODULE OPTIONS…`; `environment` is this process's when None."""
    with tempfile.TemporaryDirectory() as folder:
        output, error = Path(folder, "output"), Path(folder, "error")
        command = [*map(str, options)]
        process = fork(_main, module, command, (output, error), environment=environment)
        process.join()
        assert process.exitcode is not None
        return subprocess.CompletedProcess(
            ["python", "-m", module, *command],
            process.exitcode,
            output.read_text() if output.exists() else "",
            error.read_text() if error.exists() else "",
        )


def _pid(process: BaseProcess) -> int:
    assert process.pid is not None
    return process.pid


def _begin(environment: dict[str, str], target: Callable[..., None], arguments: tuple[object, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(*arguments)


def _main(module: str, options: list[str], outputs: tuple[Path, Path]) -> None:
    os.setsid()
    for number, path in enumerate(outputs, 1):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    # A shell that runs the tests in its background ignores SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [module, *options]
    with warnings.catch_warnings():
        # That the module was imported before.
        warnings.simplefilter("ignore", RuntimeWarning)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
