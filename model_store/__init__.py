"""Store trained models as immutable artefacts, decode scans, and preprocess them. NumPy only, no torch."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec


class _NoFolders(MetaPathFinder):
    """Let gdcm, which pydicom imports, not find the modules of Python 2 that it asks for.

    With `python -m`, it would take a folder `dl` of the working directory for one, and fail.
    """

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """No module of this name for gdcm; another finder's for anything else."""
        if name in ("dl", "DLFCN") and _importer() == "gdcm":
            raise ModuleNotFoundError(f"no module {name!r} in Python 3", name=name)
        return None


def _importer() -> str:
    """The name of the module with the statement that imports."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__") in (__name__, "importlib._bootstrap"):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


sys.meta_path.insert(0, _NoFolders())
