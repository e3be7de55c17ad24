"""What an observation costs an answer, the shift of an answer its network, and a page of ten million rows.

Processor time of one process, which another one on the machine disturbs least. A transaction with the audit
row of an answer is compared with one that has the observation, too; a graph as it was published with the same
graph that tells the moments by which the shift is measured.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from sqlalchemy import text

from benchmarks.cost.base import CostExperiment, Kind
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.tables import table
from service import observation
from service.audit import trail
from service.audit.trail import Row as AuditRow
from service.database import Database, upgrade
from service.inference.sessions import GraphSession
from service.inference.shift import Norms, Reference
from service.observation import Answer, Observed, SeenLabel, mask_digest

_MASK = np.zeros((256, 256), np.uint8)
_ROW_MS, _PAGE_MS, _SHARE = 0.3, 100, 0.05


@dataclass(frozen=True)
class Profile:
    """Answers and runs that are timed; observations in the large database, of so many hospitals."""

    answers: int = 2000
    runs: int = 40
    rows: int = 10_000_000
    hospitals: int = 100


PROFILES = {"smoke": Profile(20, 2, 2000, 2), "cpu": Profile()}

# Width of the U-Net and side of its slices; `dims` 3 for windows of a volume.
_NETWORKS = (
    {"width": 16, "side": 256, "dims": 2},
    {"width": 32, "side": 256, "dims": 2},
    {"width": 32, "side": 64, "dims": 2},
    {"width": 16, "side": 64, "dims": 3},
)


class ObservationCost(CostExperiment[Profile]):
    """The cost of knowing how the answers are."""

    name = "observation_cost"
    title = "What observing every answer costs"
    question = "What do an observation and the shift cost an answer, and a page of ten million rows?"
    profiles = PROFILES
    by = "measured"

    def kinds(self) -> Mapping[str, Kind]:
        """How each kind of cell is measured, and how its rows are shown."""
        return {
            "row": Kind(_row, _row_section),
            "shift": Kind(_shift, _shift_section),
            "page": Kind(_page, _page_section),
        }

    def measured(self) -> Sequence[Cell]:
        """A row, the shift of four networks, and pages."""
        profile = self.profile
        return [
            *({"measured": "row", "number": profile.answers, "labels": labels} for labels in (2, 8)),
            *({"measured": "shift", "number": profile.runs, **network} for network in _NETWORKS),
            {"measured": "page", "number": profile.rows, "hospitals": profile.hospitals},
        ]


def _answer(labels: int, number: int) -> Answer:
    seen = Observed(
        *("organ", "sha256:" + "1" * 64, "sha256:" + "2" * 64, f"sha256:{number:064x}", (256, 256, 40)),
        *(1.5, "float32", "CPUExecutionProvider"),
        labels=tuple(SeenLabel(f"label {each}", 0.9, 1000, 3.5, 1) for each in range(labels)),
        locum="0",
        spacing=(1.0, 1.0, 3.0),
        scanner="ACME One CT2",
        series="1.2.3",
        acquisition={"maker": "ACME", "model": "One", "software": "1.2", "station": "CT2", "slice_mm": 3.0},
        shift=1.25,
        shift_at="norms",
        mask=mask_digest(_MASK),
        choice={"model": "sha256:" + "1" * 64, "personalization": "hospital", "hospital": "north"},
    )
    return Answer(seen, None, "key:pacs@north", f"{number:036d}", "http")


def _row(cell: Cell, work: Path) -> dict[str, Any]:
    database = Database(f"sqlite:///{work / 'locum.db'}")
    upgrade(database)
    count = iter(range(10**9))
    bare = _answer(cell["labels"], 0)

    def commit(observed: bool) -> None:
        # The digest of a mask is part of observing it.
        answer = _answer(cell["labels"], next(count)) if observed else bare
        with database.write() as session:
            row = AuditRow(
                "scan.segmented", "key:pacs", scan=answer.observed.scan, details={"artefact": "o@1"}
            )
            trail.append_all(session, [row])
            observation.append(session, [answer] if observed else [])

    try:
        return _in_turn(
            {"audit row": lambda: commit(False), "and observation": lambda: commit(True)}, cell["number"]
        )
    finally:
        database.dispose()


def _shift(cell: Cell, work: Path) -> dict[str, Any]:
    import torch
    from safetensors.torch import save

    from personalization.export import to_onnx
    from personalization.networks import build
    from personalization.networks.capabilities import moving_norms

    del work
    width, side, dims = cell["width"], cell["side"], cell["dims"]
    if dims == 2:
        network = build("unet", in_channels=1, classes=3, width=width)
    else:
        network = build("monai.basicunet", in_channels=1, classes=3, width=width, norm="batch")
    draw = torch.Generator().manual_seed(0)
    for norm in moving_norms(network).values():
        assert norm.running_mean is not None
        for each in (norm.running_mean, norm.weight.data, norm.bias.data):
            each.uniform_(0.5, 1.5, generator=draw)
    layers = list(moving_norms(network))
    pairs = [[0.5, 0.5]] * len(layers)
    spread = {"members": 4, "layers": layers, "logarithm": pairs, "patient": pairs}
    norms = Norms.of(json.dumps(spread).encode(), save(network.state_dict()))
    graph = to_onnx(network.eval(), 1, (side,) * dims)
    plain = GraphSession("sha256:plain", graph, threads=1, device="cpu")
    measuring = GraphSession("sha256:shift", graph, threads=1, device="cpu", reference=Reference(norms))
    slices = np.random.default_rng(0).standard_normal((1, 1, *(side,) * dims)).astype(np.float32)
    slices = slices.repeat(plain.slices_per_run(slices.shape[1:]) if dims == 2 else 1, axis=0)
    if measuring.run_alone(slices).moments is None:
        raise RuntimeError("the graph does not tell its moments")
    return _in_turn(
        {
            "as published": lambda: plain.run_alone(slices),
            "with moments": lambda: measuring.run_alone(slices),
        },
        cell["number"],
    )


def _in_turn(calls: Mapping[str, Callable[[], object]], number: int) -> dict[str, Any]:
    """Median milliseconds of processor time of calls that take turns, and the median of their differences."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(number + 2):
        for name, call in calls.items():
            began = time.process_time()
            call()
            if turn >= 2:
                spent[name].append(time.process_time() - began)
    first, second = spent.values()
    return {
        **{name: round(1e3 * median(values), 4) for name, values in spent.items()},
        "more": round(1e3 * median(b - a for a, b in zip(first, second, strict=True)), 4),
    }


def _page(cell: Cell, work: Path) -> dict[str, Any]:
    database = Database(f"sqlite:///{work / 'large.db'}")
    upgrade(database)
    number, hospitals = cell["number"], cell["hospitals"]
    began = datetime(2024, 1, 1, tzinfo=UTC)
    with database.write() as session:
        for each in range(hospitals):
            session.execute(
                text(
                    "INSERT INTO hospital (id, name, shares_model, created_at, updated_at) "
                    "VALUES (:id, :id, 0, :at, :at)"
                ),
                {"id": f"h{each}", "at": began.replace(tzinfo=None).isoformat(sep=" ")},
            )
    columns = "id, at, hospital, model, version, graph, request, way, actor, scan, size, unlike, seconds"
    insert = (
        f"INSERT INTO observation ({columns}, warnings, precision, provider, locum, usual, shift) "
        "VALUES (?, ?, ?, 'organ', 'sha256:1', 'sha256:2', ?, 'http', 'key:pacs', ?, '[1]', 0, 1.5, "
        "'[]', 'float32', 'CPU', '0', 1, 1.25)"
    )
    labels = (
        "INSERT INTO observed_label (observation, label, confidence, voxels, volume_ml, parts, at_border) "
        "VALUES (?, 'liver', 0.9, 1000, 3.5, 1, 0)"
    )
    for start in range(0, number, 50_000):
        numbers = range(start + 1, min(start + 50_000, number) + 1)
        rows = [
            (
                each,
                (began + timedelta(seconds=6 * each)).strftime("%Y-%m-%d %H:%M:%S.000000"),
                f"h{each % hospitals}",
                f"r{each:012}",
                f"{each:064x}",
            )
            for each in numbers
        ]
        # A longer transaction would wait for its own log.
        with database.engine.begin() as connection:
            raw = connection.connection.cursor()
            raw.executemany(insert, rows)
            raw.executemany(labels, [(each,) for each in numbers])
    found = {}
    try:
        for name, before in (("the newest 100", None), ("100 from the middle", number // 2)):
            took = []
            for _ in range(20):
                clock = time.perf_counter()
                with database.read() as session:
                    page = observation.page(session, "h1", "organ", before=before)
                took.append(time.perf_counter() - clock)
                if len(page) != min(100, (before or number) // hospitals):
                    raise RuntimeError(f"expected a page of 100, found {len(page)}")
            found[name] = {"median": round(1e3 * median(took), 2), "first": round(1e3 * took[0], 2)}
    finally:
        database.dispose()
    return found


def _row_section(rows: Sequence[Row]) -> list[str]:
    lines = [
        [
            str(row["cell"]["labels"]),
            f"{row['result']['audit row']:.2f}",
            f"{row['result']['and observation']:.2f}",
            f"{row['result']['more']:.2f}",
        ]
        for row in rows
    ]
    return [
        "## A row",
        "Milliseconds of processor time of a transaction, median over answers that take turns.",
        table(("labels", "audit row", "and observation", "more"), lines),
        f"Asked for: at most {_ROW_MS} ms more.",
    ]


def _shift_section(rows: Sequence[Row]) -> list[str]:
    lines = [
        [
            f"{row['cell']['width']}",
            " x ".join([str(row["cell"]["side"])] * row["cell"]["dims"]),
            f"{row['result']['as published']:.1f}",
            f"{100 * row['result']['more'] / row['result']['as published']:+.1f} %",
        ]
        for row in rows
    ]
    return [
        "## The shift of an answer",
        "Processor time of a run, one thread. Moments of the first third of the batch norms; the answer "
        "stays the same to the bit.",
        table(("width of the U-Net", "input", "milliseconds as published", "with moments"), lines),
        f"Asked for: at most {100 * _SHARE:.0f} %.",
    ]


def _page_section(rows: Sequence[Row]) -> list[str]:
    number = rows[0]["cell"]["number"]
    lines = [
        [name, f"{each['median']:.1f}", f"{each['first']:.1f}"] for name, each in rows[0]["result"].items()
    ]
    return [
        f"## Pages of {number:,} observations",
        f"One of {rows[0]['cell']['hospitals']} hospitals, on SQLite.",
        table(("page", "milliseconds, median", "the first time"), lines),
        f"Asked for: {_PAGE_MS} ms.",
    ]
