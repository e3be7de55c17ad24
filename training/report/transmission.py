"""The report's section on FedOAP traffic: bytes per round and site, beside the paper's transmission table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from training.algorithm import Publication
from training.record import RunRecord

# Table 4, per round between a client and the server. The table says MB, but its figures are MiB: 118.37 MiB
# are the 31,030,593 float32 parameters of the paper's U-Net.
PAPER: Mapping[str, float] = {
    "FedAvg": 118.37,
    "FedPer and FedRep": 71.88,
    "FedDP and FedOAP": 130.44,
}
PAPER_WIDTH = 64


def content(record: RunRecord, publication: Publication | None) -> dict[str, Any] | None:  # noqa: ARG001
    """Collect the variables of `transmission.html`; None without a round of stage 1.

    Each group has the most bytes that one site sent and received in a round: sites that withhold their tokens
    send less, and the bank is empty in the first round.
    """
    rounds = [entry for entry in record.rounds if entry.phase == "train" and entry.sites]
    if not rounds:
        return None
    sites = [site for entry in rounds for site in entry.sites.values()]
    most = {
        direction: _most([getattr(site, direction) for site in sites]) for direction in ("sent", "received")
    }
    groups = list(dict.fromkeys([*most["sent"], *most["received"]]))
    return {
        "rows": [
            {"group": group, "sent": most["sent"].get(group), "received": most["received"].get(group)}
            for group in groups
        ],
        "paper": PAPER,
        "paper_width": PAPER_WIDTH,
        "width": record.config.get("width"),
    }


def mebibytes(count: int | None) -> str:
    """Format bytes in MiB, the paper's unit, and None as a dash."""
    return "–" if count is None else f"{count / 2**20:.2f}"


def _most(counts: list[Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for by_group in counts:
        for group, count in by_group.items():
            found[group] = max(count, found.get(group, 0))
    return found
