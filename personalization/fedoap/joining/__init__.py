"""Joining FedOAP's federation: a hospital's own query stage and spatial adapter, from a few of its masks.

    joined = join(network, train, validation, JoiningConfig())

The network comes with the shared part, the whole bank and a personal part to begin with (zero-shot). What it
learns stays in it; what is left in it is the best epoch on the validation patients, step 0 among them.
"""

from personalization.fedoap.joining.checkpoint import JoiningCheckpoint, JoiningEpoch
from personalization.fedoap.joining.config import JoiningConfig
from personalization.fedoap.joining.examples import JoiningExamples
from personalization.fedoap.joining.join import Joining, join, predict
from personalization.fedoap.joining.verdict import JOINING, ObservedJoining

__all__ = [
    "JOINING",
    "Joining",
    "JoiningCheckpoint",
    "JoiningConfig",
    "JoiningEpoch",
    "JoiningExamples",
    "ObservedJoining",
    "join",
    "predict",
]
