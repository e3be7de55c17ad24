"""The interface of algorithms: its documented example runs."""

from __future__ import annotations

import re
import textwrap
from functools import partial

import torch

import training.algorithm
from training.algorithm import Memory
from training.engine.client import RunEnvironment
from training.engine.egress import SiteSpec
from training.engine.engine import FederationEngine
from training.engine.folder import RunFolder
from training.errors import FederationError, ProblemsFound


def test_documented_example_algorithm_runs(tmp_path):
    code = re.search(r"( {4}class Mean.*)", training.algorithm.__doc__, re.DOTALL).group(1)
    names = {**vars(training.algorithm), "torch": torch}
    exec(textwrap.dedent(code), names)
    sites = [SiteSpec("A", partial(list, [1.0, 2.0, 6.0])), SiteSpec("B", partial(list, [11.0]))]
    engine = FederationEngine(names["Mean"](), sites, RunEnvironment(0), RunFolder(tmp_path), workers=0)
    assert engine.run().server.facts == {"mean": 5.0}


def test_errors_with_problems_survive_pickling():
    import pickle

    error = pickle.loads(pickle.dumps(FederationError("the folder is wrong:", ["no masks", "no images"])))
    assert isinstance(error, FederationError)
    assert isinstance(error, ProblemsFound)
    assert error.problems == ("no masks", "no images")
    assert str(error) == "the folder is wrong:\n  - no masks\n  - no images"


def test_memory_default_tensors_are_not_shared():
    assert Memory().tensors is not Memory().tensors
