"""Compare federated methods on one's own hospitals: the same splits, rounds and code as `training.federate`.

compare(Request(methods=("fedavg", "fedbn"), ...))   trains what is missing, and returns the table
Comparison                                           the table: lines, verdict, Markdown

It resumes: a finished cell, which is a method with a seed, is not trained again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.compare.page import Comparison
    from training.compare.run import Request, compare

__all__ = ["Comparison", "Request", "compare"]


def __getattr__(name: str) -> Any:
    # They import torch, which the command's help does not need.
    if name == "Comparison":
        from training.compare.page import Comparison

        return Comparison
    if name in __all__:
        from training.compare import run

        return getattr(run, name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
