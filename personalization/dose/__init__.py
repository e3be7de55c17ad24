"""The dose by shift that `auto` serves, and what a federation learned of it by practising on its members.

The service measures how far a hospital's scans are from what is usual between the members, takes the dose
that this asks for, and judges it (`by_shift`). Members may take turns as the hospital from outside: the dose
adapts to their unlabelled scans, and their labels score the change (`practise`). The record of that
(`Playbook`) gives the gate its cap and its licence.
"""

from __future__ import annotations

from personalization.dose.auto import ByShift, by_shift
from personalization.dose.lensed import Lensed, by_lens, by_lens_alone, by_scale
from personalization.dose.playbook import FILE, Episode, Playbook, ShiftRecord
from personalization.dose.practice import Change, Practice, passes, practise
from personalization.dose.view import View, targets_of, typical_targets, view

__all__ = [
    "FILE",
    "ByShift",
    "Change",
    "Episode",
    "Lensed",
    "Playbook",
    "Practice",
    "ShiftRecord",
    "View",
    "by_lens",
    "by_lens_alone",
    "by_scale",
    "by_shift",
    "passes",
    "practise",
    "targets_of",
    "typical_targets",
    "view",
]
