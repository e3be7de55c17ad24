"""Federated methods, one per file, by name."""

from __future__ import annotations

from training.methods.fedavg import FedAvg, FedAvgConfig
from training.methods.fedbicross import FedBiCross
from training.methods.fedbicross_config import FedBiCrossConfig
from training.methods.fedins import FedIns
from training.methods.fedins_config import FedInsConfig
from training.methods.fedoap import FedOap
from training.methods.fedoap_config import FedOapConfig
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
