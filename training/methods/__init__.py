"""Federated methods, one per file, by name."""

from __future__ import annotations

from training.methods.fedavg import FedAvg, FedAvgConfig
from training.methods.fedbicross.config import FedBiCrossConfig
from training.methods.fedbicross.method import FedBiCross
from training.methods.fedins.config import FedInsConfig
from training.methods.fedins.method import FedIns
from training.methods.fedoap.config import FedOapConfig
from training.methods.fedoap.method import FedOap
from training.methods.iop_fl import IopFl, IopFlConfig
from training.methods.registry import Method, method, methods

__all__ = [
    "FedAvg",
    "FedAvgConfig",
    "FedBiCross",
    "FedBiCrossConfig",
    "FedIns",
    "FedInsConfig",
    "FedOap",
    "FedOapConfig",
    "IopFl",
    "IopFlConfig",
    "Method",
    "method",
    "methods",
]
