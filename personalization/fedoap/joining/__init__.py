"""Join a FedOAP federation: fine-tune an outside hospital's personal part on a few of its masks.

    joined = join(network, train, validation, JoiningConfig(), score)

The network comes with the shared part, the whole bank and an initial personal part (zero-shot). It is trained
in place, and left with the weights of the best epoch on the validation patients; step 0 counts as an epoch.
"""

from personalization.fedoap.joining.checkpoint import JoiningCheckpoint, JoiningEpoch
from personalization.fedoap.joining.config import JoiningConfig
from personalization.fedoap.joining.join import Joining, join, predict
from personalization.fedoap.joining.verdict import JOINING, ObservedJoining

__all__ = [
    "JOINING",
    "Joining",
    "JoiningCheckpoint",
    "JoiningConfig",
    "JoiningEpoch",
    "ObservedJoining",
    "join",
    "predict",
]
