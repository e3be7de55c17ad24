"""Every figure of the transmission table in the explanation of FedOAP, computed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from model_store.task import Task
from personalization.fedoap.parts import split
from personalization.networks import FedOapUNet, build
from training.algorithm import Memory
from training.methods.fedoap.config import FedOapConfig
from training.methods.fedoap.method import FedOap
from training.methods.fedoap.stages import Federated
from training.report.transmission import PAPER, PAPER_WIDTH

PAGE = Path(__file__).parents[3] / "docs/explanation/fedoap.md"
TASK = Task(name="tumour", labels={"tumour": (1,)}, size=(128, 128))
FLOAT32, MIB = 4, 2**20


def table() -> dict[str, tuple[str, str, str]]:
    section = PAGE.read_text(encoding="utf-8").split("## What leaves a hospital")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {name: (figure, of, paper) for name, figure, of, paper in rows}


def network(**options: bool) -> FedOapUNet:
    with torch.device("meta"):
        made = build("fedoap", in_channels=1, width=PAPER_WIDTH, **options)
    assert isinstance(made, FedOapUNet)
    return made


def counted(names_start_with: tuple[str, ...] = ("",)) -> int:
    state = network(attention=False, adapter=False).state_dict()
    return sum(tensor.numel() for name, tensor in state.items() if name.startswith(names_start_with))


def mib(float32: int) -> str:
    return f"{FLOAT32 * float32 / MIB:.2f} MiB"


def weights(float32: int) -> tuple[str, str]:
    return mib(float32), f"{float32:,} float32"


def test_every_row_is_what_the_code_comes_to() -> None:
    shared, _ = split(network().state_dict())
    key, value = network().keys_and_values(torch.zeros(1, 1, 128, 128, device="meta"))
    assert key.shape == value.shape
    _, positions, features = key.shape
    entry = mib(key.numel() + value.numel())
    expected = {
        "shared weights, up and down": weights(sum(tensor.numel() for tensor in shared.values())),
        "own tokens, up": (entry, f"{positions} positions × {features} features × 2 float32"),
        "the others' tokens, down": (f"{entry} × (K − 1)", "as many of each"),
        "plain U-Net, all of it": weights(counted()),
        "plain U-Net, encoder and bottleneck": weights(counted(("encoder", "bottleneck"))),
    }
    assert {name: cells[:2] for name, cells in table().items()} == expected


def test_the_others_are_all_but_the_site_itself() -> None:
    entry = {"key": torch.zeros(4, 32), "value": torch.zeros(4, 32)}
    method = FedOap(FedOapConfig(width=2), TASK)
    bank = method.first.slot.write(Memory(), Federated(bank=dict.fromkeys("ABCDE", entry)))
    (train,) = (phase for phase in method.plan() if phase.name == "train")
    received = train.broadcast(bank, "C")["bank"]
    assert sum(t.numel() for t in received.values()) == (5 - 1) * sum(t.numel() for t in entry.values())


def test_the_papers_figures_are_quoted_and_those_of_the_plain_network_are_met() -> None:
    rows = table()
    quoted = {
        "shared weights, up and down": ("FedDP and FedOAP", "130.44"),
        "plain U-Net, all of it": ("FedAvg", "118.37"),
        "plain U-Net, encoder and bottleneck": ("FedPer and FedRep", "71.88"),
    }
    for name, (method, figure) in quoted.items():
        assert re.match(r"[0-9.]+", rows[name][2])[0] == figure == f"{PAPER[method]:.2f}"  # type: ignore[index]
    assert {rows[name][2] for name in rows.keys() - quoted.keys()} == {"–"}
    for name in ("plain U-Net, all of it", "plain U-Net, encoder and bottleneck"):
        assert rows[name][0] == f"{quoted[name][1]} MiB"
    # Theirs has norms with weights, or something else that small: it is not said.
    ours = float(rows["shared weights, up and down"][0].split()[0])
    assert ours == pytest.approx(PAPER["FedDP and FedOAP"], rel=5e-4)
