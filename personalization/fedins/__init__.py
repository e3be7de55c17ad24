"""FedIns: instance-adaptive inference with a pool of scales and shifts (Feng et al., ICCV 2023)."""

from __future__ import annotations

from personalization.fedins.lookup import PoolLookup, look_up, random_entries
from personalization.fedins.losses import fedins_loss, key_matching_loss
from personalization.fedins.network import InstanceAdaptive, PoolOutput
from personalization.fedins.points import Point, adapted, points_of
from personalization.fedins.pool import Delta, SsfPool
from personalization.fedins.prompts import PromptAdaptive, PromptPool, prompted
from personalization.fedins.usage import key_entropy, unused, usage_of

__all__ = [
    "Delta",
    "InstanceAdaptive",
    "Point",
    "PoolLookup",
    "PoolOutput",
    "PromptAdaptive",
    "PromptPool",
    "SsfPool",
    "adapted",
    "fedins_loss",
    "key_entropy",
    "key_matching_loss",
    "look_up",
    "points_of",
    "prompted",
    "random_entries",
    "unused",
    "usage_of",
]
