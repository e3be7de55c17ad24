"""Help of the commands: it answers without torch, of which the import alone takes seconds."""

from __future__ import annotations

import subprocess
import sys

import pytest

HELP = """
import runpy, sys
sys.argv = ["command", *sys.argv[1:], "--help"]
try:
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code, end.code
print("torch" in sys.modules, "pydicom" in sys.modules)
"""


@pytest.mark.process
@pytest.mark.parametrize(
    "module",
    [
        *("training.federate", "training.site", "training.exchange", "training.tasks"),
        *("training.compare", "training.plan", "training.weights", "training.network", "locum.demo"),
        *("model_store", "service", "locum", "benchmarks"),
        *("service keys", "service keys create", "service audit verify", "service doctor"),
        *(
            "service.worker",
            "service.worklist",
            "service.dicom_node",
            "service.quantisation",
            "service.distance",
        ),
    ],
)
def test_help_imports_neither_torch_nor_the_readers_of_scans(module: str) -> None:
    name, *commands = module.split()
    done = subprocess.run(
        [sys.executable, "-c", HELP.replace("MODULE", repr(name)), *commands],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "--help" in done.stdout
    assert done.stdout.splitlines()[-1] == "False False"
