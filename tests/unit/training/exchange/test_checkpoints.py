"""Tensors of a stranger's file are read; code in it is not run."""

from __future__ import annotations

import io
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.training.archives import deflated
from training.errors import ImportRefused
from training.exchange import checkpoints


def _saved(found: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(found, buffer, **options)
    return buffer.getvalue()


class _Planted:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: {"model": s}, lambda s: {"network_weights": s}])
def test_a_state_is_found_bare_or_by_its_usual_names(wrap: Any) -> None:
    network = nn.Conv3d(1, 2, 3)
    state = checkpoints.state_of(checkpoints.load(_saved(wrap(network.state_dict())), "x"), 1, "x")

    assert checkpoints.fill(nn.Conv3d(1, 2, 3), state, "x").keys() == network.state_dict().keys()
    assert torch.equal(state["weight"], network.weight)


@pytest.mark.parametrize("prefix", ["", "module.", "net.", "model.network."])
def test_weights_behind_a_prefix_are_those_of_the_network_alone(prefix: str) -> None:
    network = nn.Sequential(nn.Conv3d(1, 2, 3), nn.BatchNorm3d(2))
    wanted = network.state_dict()
    saved = {f"{prefix}{name}": each for name, each in wanted.items()}
    further = {"loss.weight": torch.zeros(1)} if prefix else {}
    found = checkpoints.by_names({**saved, **further}, wanted, "x")
    assert found.keys() == wanted.keys()
    assert checkpoints.fill(network, found, "x").keys() == wanted.keys()


def test_weights_of_several_networks_are_refused_by_their_prefixes() -> None:
    wanted = nn.Conv3d(1, 2, 3).state_dict()
    both = {f"{name}.{key}": each for name in ("student", "teacher") for key, each in wanted.items()}
    with pytest.raises(ImportRefused, match=r"those of several, called student.…, teacher.…"):
        checkpoints.by_names(both, wanted, "x")


def test_a_state_under_an_unusual_name_is_found_where_it_is_the_only_one() -> None:
    state = nn.Conv3d(1, 2, 3).state_dict()
    assert checkpoints.state_of({"epoch": 3, "weights": state}, 1, "x").keys() == state.keys()
    with pytest.raises(ImportRefused, match="found several, under a, b: save the one"):
        checkpoints.state_of({"a": state, "b": state}, 1, "x")


def test_weights_of_another_class_are_called_so() -> None:
    with pytest.raises(ImportRefused, match=r"without any of weight, bias .*, with stem.w .*another"):
        checkpoints.fill(nn.Conv3d(1, 2, 3), {"stem.w": torch.zeros(1)}, "x")


def test_planted_code_is_refused_and_not_run(tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    with pytest.raises(ImportRefused, match="weights_only"):
        checkpoints.load(_saved({"model": {}, "x": _Planted(planted)}), "model.pt")
    assert not planted.exists()


def test_a_pickled_module_is_refused() -> None:
    with pytest.raises(ImportRefused, match="state_dict"):
        checkpoints.load(_saved(nn.Conv2d(1, 1, 1)), "model.pt")


def test_torchscript_is_refused_with_the_reason() -> None:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(nn.Conv2d(1, 1, 1)), buffer)
    with pytest.raises(ImportRefused, match="TorchScript has code"):
        checkpoints.load(buffer.getvalue(), "model.pt")


def test_numpys_scalars_of_nnunets_log_are_read() -> None:
    found = checkpoints.load(_saved({"_best_ema": np.float64(0.5), "epoch": np.int64(3)}), "x")
    assert found == {"_best_ema": 0.5, "epoch": 3}


def test_other_bytes_and_a_legacy_file_are_refused() -> None:
    for content in (b"", b"text", _saved({}, _use_new_zipfile_serialization=False)):
        with pytest.raises(ImportRefused, match=r"expected a file of torch.save"):
            checkpoints.load(content, "x")


def test_a_file_that_expands_to_too_much_is_refused_before_it_is_read() -> None:
    with pytest.raises(ImportRefused, match=r"model.pt: expected at most 64 MiB of numbers .* found 72 MiB"):
        checkpoints.load(deflated(_saved({"w": torch.zeros(18 << 20)})), "model.pt")


def test_a_state_of_views_that_repeat_their_numbers_is_refused() -> None:
    found = checkpoints.load(_saved({"w": torch.zeros(1).expand(1 << 20, 1 << 10)}), "x")
    with pytest.raises(ImportRefused, match=r"x: expected at most 64 MiB .* found 4096 MiB"):
        checkpoints.state_of(found, 1000, "x")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight": None}, "without weight"),
        ({"other": torch.zeros(1)}, "has besides other"),
        (
            {"weight": torch.zeros(1, 1, 3)},
            r"of another shape weight .expected \[2, 1, 3\], found \[1, 1, 3\]",
        ),
        ({"weight": torch.full((2, 1, 3), float("nan"))}, "not finite"),
    ],
)
def test_weights_that_do_not_fit_are_named(change: dict[str, torch.Tensor | None], said: str) -> None:
    state = {**nn.Conv1d(1, 2, 3).state_dict(), **change}
    with pytest.raises(ImportRefused, match=said):
        checkpoints.fill(nn.Conv1d(1, 2, 3), {k: v for k, v in state.items() if v is not None}, "model.pt")


@pytest.mark.parametrize("found", [[], {}, {"model": 3}, {"w": torch.zeros(1), "epoch": 3}])
def test_what_has_no_state_is_refused(found: Any) -> None:
    with pytest.raises(ImportRefused, match="expected a state dict"):
        checkpoints.state_of(found, 1, "x")
