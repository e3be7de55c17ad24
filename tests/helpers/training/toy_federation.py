"""A federated method small enough to compute by hand, with sites that fail on request.

It is a separate module because worker processes import it.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from functools import partial

import torch

from training.algorithm import (
    Algorithm,
    ClientResult,
    Group,
    Memory,
    Phase,
    Publication,
    ServerStage,
)
from training.engine.egress import SiteSpec
from training.errors import SiteFailed

WEIGHTS = Group("weights", "weights", "mean")
TOTAL = Group("total", "statistics", "sum", essential=False)
TOKENS = Group("tokens", "features", "concat", essential=False)
NOTES = Group("notes", "statistics", "collect", essential=False)
TRAIL = Group("trail", "weights", "collect")


@dataclass(frozen=True)
class ToyData:
    values: tuple[float, ...]
    faults: dict[int, str] = field(default_factory=dict)
    images: int | None = None


class Toy(Algorithm):
    """w_k = w_g + mean(values) + noise; each site keeps the trail of its w_k. A server stage, then export."""

    def __init__(self, rounds: int = 3, noise: bool = False, width: int = 2) -> None:
        self.rounds, self.noise, self.width = rounds, noise, width

    def plan(self):
        return (
            Phase(
                "train",
                self.rounds,
                (WEIGHTS,),
                (WEIGHTS, TOTAL, TOKENS, NOTES),
                self.train,
                self.average,
                self.send,
            ),
            ServerStage("double", 2, self.double),
            Phase("export", 1, (), (TRAIL,), self.export, self.keep_trails, consent=True),
        )

    def initial(self, context):
        return Memory({"w": torch.zeros(self.width), "count": torch.tensor(7)}, {"log": []})

    def send(self, server, site):
        return {"weights": {name: server.tensors[name] for name in ("w", "count")}}

    def export(self, context, received, memory, data):
        if data.faults.get(-2) == "raise":
            raise SiteFailed("the line is down")
        return ClientResult({"trail": {"trail": memory.tensors["trail"]}}, 1.0)

    def train(self, context, received, memory, data):
        w = received["weights"]["w"] + sum(data.values) / len(data.values)
        if self.noise:
            w = w + torch.randn(self.width, generator=context.generator("noise"))
        fault = data.faults.get(context.round)
        if fault == "raise":
            raise SiteFailed("the scanner is on fire")
        if fault == "bug":
            # The name of a file need not be valid text.
            raise KeyError("jane-doe.nii.gz", "\udcff")
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "nan":
            w = w * float("nan")
        if fault == "shape":
            w = torch.cat([w, w])
        uploads = {
            "weights": {"w": w, "count": torch.tensor(len(data.values))},
            "total": {"n": torch.tensor([float(len(data.values))], dtype=torch.float64)},
            "tokens": {"values": torch.tensor(data.values)},
            "notes": {"first": torch.tensor([data.values[0]])},
        }
        if fault == "undeclared":
            uploads["secret"] = {"values": torch.tensor(data.values)}
        trail = torch.cat([memory.tensors.get("trail", torch.zeros(0)), w[:1]])
        seen = Memory({"trail": trail}, {"seen": memory.facts.get("seen", 0) + 1})
        weight = 1e15 if fault == "heavy" else len(data.values)
        return ClientResult(uploads, weight, seen, {"seen": seen.facts["seen"], "loss": float("nan")})

    def keep_trails(self, context, server, result):
        trails = {site: state["trail"].tolist() for site, state in result.collected["trail"].items()}
        return Memory(server.tensors, {**server.facts, "trails": trails})

    def average(self, context, server, result):
        log = {
            "sites": list(result.weights),
            "total": result.reduced["total"]["n"].item() if "total" in result.reduced else None,
            "tokens": result.reduced["tokens"]["values"].tolist() if "tokens" in result.reduced else None,
            "notes": {
                site: state["first"].item() for site, state in result.collected.get("notes", {}).items()
            },
        }
        return Memory(dict(result.reduced["weights"]), {**server.facts, "log": [*server.facts["log"], log]})

    def double(self, context, server):
        return Memory({**server.tensors, "w": server.tensors["w"] * 2}, server.facts)

    def publication(self, server):
        return Publication("toy", ())


def load(data: ToyData) -> ToyData:
    if data.faults.get(-1) == "unreadable":
        raise SiteFailed("image 3 is torn")
    return data


def site(name: str, *values: float, faults: dict[int, str] | None = None, **options: object) -> SiteSpec:
    return SiteSpec(name, partial(load, ToyData(values, faults or {})), **options)
