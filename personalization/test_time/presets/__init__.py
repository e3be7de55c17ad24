"""The objective of each preset, in a module of the preset's name as `OBJECTIVE`.

A preset is a line in `personalization.options.presets` and a module here. Its objective is a `WeightedSum`,
or any other `Objective` with a loss and a step of its own.
"""

from __future__ import annotations

from importlib import import_module

from personalization.test_time.objective import Objective


def objective_of(preset: str) -> Objective:
    """The objective of a preset in `PRESETS`."""
    objective: Objective = import_module(f"{__name__}.{preset}").OBJECTIVE
    return objective
