"""Options are what the API imports of personalization: they load no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import pkgutil, sys
from importlib import import_module
import personalization.options as options

names = [module.name for module in pkgutil.iter_modules(options.__path__)]
for name in names:
    import_module(f"personalization.options.{name}")
loaded = {name.partition(".")[0] for name in sys.modules}
print(*sorted(names), "|", *sorted(loaded & {"torch", "monai", "numpy", "scipy", "onnx", "sklearn"}))
"""


@pytest.mark.process
def test_options_import_neither_torch_nor_numpy() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    names, _, loaded = ran.stdout.strip().partition(" |")
    assert {"adaptation", "joining", "picking", "presets"} <= {*names.split()}
    assert loaded == ""
