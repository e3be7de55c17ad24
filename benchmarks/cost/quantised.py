"""Graphs in int8 beside the float32 graph of the same weights: agreement, Dice and processor time.

A network is trained by federated averaging at the hospitals of a set but one, and answers that one. Each
recipe makes a graph on scans of a quarter of its patients. On the others its masks are compared with those of
the float32 graph, as the gate of `python -m model_store quantise` does, without labels; then both with masks
that were drawn, which decided nothing. Runs of one slice, or of one patch, alternate between the graphs,
and medians of the processor time of one thread are compared. Where the package `openvino` is installed, it
runs the same graphs in the same turns.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.cost.base import CostExperiment, Kind
from benchmarks.harness.cells import Cell, Row
from benchmarks.harness.tables import crossed, table
from model_store.digest import sha256
from model_store.graphs import parse_graph
from model_store.manifest import Lineage, ModelManifest, NetworkSpec
from model_store.preprocessing import align, class_map
from model_store.scan import Limits
from model_store.store import Store
from model_store.task import Normalisation, Task, VolumeGeometry
from personalization.export import to_onnx
from service.inference.pipeline import PreparedScan, Stopwatch, read, segment
from service.inference.sessions import GraphSession
from service.quantisation.graph import RECIPE, Recipe, reduced
from service.quantisation.verdict import LEAST_AGREEMENT, PatientCounts
from service.quantisation.work import MOST_INPUTS, dealt, inputs_of
from training.config import RunConfig
from training.data.cases import Case, Federation
from training.data.federation import load_federation
from training.data.scan_files import mask_of
from training.local.networks import network_of
from training.methods.registry import method
from training.phantom import write_federation
from training.phantom.federation import TASK as PHANTOM
from training.run import Run, execute
from training.tasks import template

# A side at which a 2-D network is timed too: what fixed costs take is small there.
LARGE = 256
# Times the scans per processor second of float32.
_GOAL = 2.5
_HIPPOCAMPUS = "hippocampus_nifti"
RECIPES: Mapping[str, Recipe] = {
    "as served": RECIPE,
    "no layer in float": Recipe(first_in_float=False, last_in_float=False),
    "one scale per weight": Recipe(per_channel=False),
    "weights of 8 bits": Recipe(seven_bits=False),
    "min-max": Recipe(scales="minmax"),
    "entropy": Recipe(scales="entropy"),
}


@dataclass(frozen=True)
class SetOf:
    """The hospital of a set that is answered, its rounds of training, and patients at most."""

    held: str
    rounds: int
    patients: int = 24


@dataclass(frozen=True)
class Network:
    """Fields of FedAvg's configuration, and the sets."""

    fields: Mapping[str, Any]
    sets: tuple[str, ...]


@dataclass(frozen=True)
class Profile:
    """Networks by name, sets, turns that are timed."""

    networks: Mapping[str, Network]
    sets: Mapping[str, SetOf]
    turns: int = 15
    phantom: bool = False
    recipes: tuple[str, ...] = field(default=tuple(RECIPES))


_FAST = {"precision": "bfloat16"}
_FEW = {**_FAST, "local_steps": 12}
PROFILES = {
    "smoke": Profile(
        {"U-Net 2": Network({"width": 2, "least_steps": 2}, ("phantom",))},
        {"phantom": SetOf("birch", 1)},
        turns=3,
        phantom=True,
        recipes=("as served", "min-max"),
    ),
    "cpu": Profile(
        {
            "U-Net, width 16": Network({"width": 16, **_FAST}, ("brain_lgg_flair",)),
            "U-Net, width 16, few steps": Network({"width": 16, **_FEW}, ("lungs_cxr",)),
            "U-Net, width 32": Network({"width": 32, **_FEW}, ("lungs_cxr",)),
            "MONAI BasicUNet, width 16": Network(
                {"network": "monai.basicunet", "width": 16, **_FEW}, ("lungs_cxr",)
            ),
            "3-D U-Net, width 8": Network({"width": 8, **_FEW}, (_HIPPOCAMPUS,)),
        },
        {
            "brain_lgg_flair": SetOf("FG", 10, 14),
            "lungs_cxr": SetOf("Montgomery", 4, 16),
            _HIPPOCAMPUS: SetOf("west", 5, 10),
        },
    ),
}


class Quantised(CostExperiment[Profile]):
    """What int8 saves, and what it changes."""

    name = "quantised"
    title = "Graphs in int8"
    question = "How much processor time does int8 save, and do its masks stay those of float32?"
    profiles = PROFILES
    data_help = "the folder that has the sets; the profile smoke writes a phantom and reads nothing there"

    def kinds(self) -> Mapping[str, Kind]:
        """One kind."""
        return {"": Kind(self._compute, _section)}

    def measured(self) -> Sequence[Cell]:
        """By network and set."""
        profile = self.profile
        return [
            {
                "network": name,
                "set": set_,
                "fields": dict(network.fields),
                **asdict(profile.sets[set_]),
                "turns": profile.turns,
                "recipes": list(profile.recipes),
            }
            for name, network in profile.networks.items()
            for set_ in network.sets
        ]

    def _compute(self, cell: Cell, work: Path) -> dict[str, Any]:
        federation = self._federation(cell["set"], work)
        began = time.process_time()
        manifest, graph = _trained(cell, federation, work)
        seconds = time.process_time() - began
        scans = _scans(federation, cell, manifest)
        return {"training_s": round(seconds, 1), **_compared(cell, manifest, graph, scans)}

    def _federation(self, set_: str, work: Path) -> Federation:
        if set_ == "phantom":
            folder = work / "phantom"
            if not folder.exists():
                write_federation(folder, ("aster", "birch"), 4)
            return load_federation(folder, PHANTOM)
        if set_ != _HIPPOCAMPUS:
            return load_federation(self.data / set_, template(set_))
        return load_federation(_in_three(self.data / set_, work / "federation"), _volumes())


def _volumes() -> Task:
    return Task(
        name="hippocampus",
        labels=template(_HIPPOCAMPUS).labels,
        normalisation=Normalisation(scope="volume", method="zscore", percentiles=(1, 99)),
        geometry=VolumeGeometry(spacing=(1.0, 1.0, 1.0), patch=(32, 48, 32)),
    )


def _in_three(source: Path, folder: Path) -> Path:
    """Deal the volumes to three sites, by links. The set has no hospitals of its own."""
    names = sorted(path.name for path in (source / "images").glob("*.nii.gz"))
    for index, name in enumerate(names):
        site = folder / ("north", "south", "west")[index % 3]
        for part, of in (("images", "images"), ("masks", "labels")):
            (site / part).mkdir(parents=True, exist_ok=True)
            link = site / part / name
            if not link.is_symlink():
                link.symlink_to((source / of / name).resolve())
    return folder


def _trained(cell: Cell, federation: Federation, work: Path) -> tuple[ModelManifest, bytes]:
    """Train at all sites but the one that is answered, in float32 graphs' own training."""
    members = federation.only({*federation.names} - {cell["held"]})
    config = method("fedavg").config(rounds=cell["rounds"], **cell["fields"])
    config = config.prepared(Store(work / "none"), federation.task, "quantised")
    run = Run(members, "fedavg", config, RunConfig(seed=0, consent="all"), scores_tests=False)
    done = execute(run, work / "run", workers=0, resume=(work / "run").exists())
    draft = done.publication.models[0]
    network = network_of(draft.network, draft.weights, torch.device("cpu")).eval()
    task = federation.task
    manifest = ModelManifest(
        name="quantised",
        task=task,
        network=NetworkSpec(name=draft.network.name, arguments=draft.network.arguments),
        lineage=Lineage(method="fedavg", run="quantised", sites=(), rounds=0, seed=0),
    )
    return manifest, to_onnx(network, task.in_channels, task.input_shape)


@dataclass(frozen=True)
class _Scan:
    """One scan of the hospital, and the mask that was drawn, class indices on the same grid."""

    patient: str
    reading: PreparedScan
    drawn: NDArray[np.uint8]


def _scans(federation: Federation, cell: Cell, manifest: ModelManifest) -> list[_Scan]:
    cases = federation.site(cell["held"]).cases
    kept = {*sorted({case.patient for case in cases})[: cell["patients"]]}
    return [_scan(case, manifest) for case in cases if case.patient in kept]


def _scan(case: Case, manifest: ModelManifest) -> _Scan:
    reading = read(case.image.read_bytes(), manifest, Limits(), Stopwatch())
    mask, scan = mask_of(case), reading.scan
    if scan.affine is not None:
        mask = align(mask, scan.grid, scan.affine, scan.other_affine)
    return _Scan(case.patient, reading, class_map(mask, manifest.task))


def _compared(cell: Cell, manifest: ModelManifest, graph: bytes, scans: Sequence[_Scan]) -> dict[str, Any]:
    task, names = manifest.task, sorted({scan.patient for scan in scans})
    calibrating, judging, overlap = dealt([names.index(scan.patient) for scan in scans])
    most = MOST_INPUTS[task.spatial_dims]
    inputs = [
        each
        for index in calibrating[:most]
        for each in inputs_of(scans[index].reading.prepared, manifest, max(1, most // len(calibrating)))
    ]
    judged = [scans[index] for index in judging]
    graphs = {"float32": graph}
    graphs |= {name: reduced(graph, "int8", inputs, RECIPES[name]) for name in cell["recipes"]}
    before = _masks(graph, manifest, judged)
    arms = {}
    for name, content in graphs.items():
        masks = before if name == "float32" else _masks(content, manifest, judged)
        found = _agreement(judged, before, masks, task)
        arms[name] = {**found, "dice": _dice(judged, masks, task), "bytes": len(content)}
    times = {"own": _times(graphs, inputs[0].shape, cell["turns"])}
    if task.spatial_dims == 2:
        large = {name: _resized(content) for name, content in graphs.items()}
        times["large"] = _times(large, (task.in_channels, LARGE, LARGE), cell["turns"])
    return {
        "arms": arms,
        "overlap": overlap,
        "patients": len({scan.patient for scan in judged}),
        "scans": len(judged),
        "side": [*inputs[0].shape[1:]],
        "milliseconds": times,
        "instructions": _instructions(),
    }


def _masks(graph: bytes, manifest: ModelManifest, scans: Sequence[_Scan]) -> list[NDArray[np.uint8]]:
    session = GraphSession(sha256(graph), graph, threads=1, device="cpu")
    return [segment(scan.reading, manifest, session, Stopwatch()).classes for scan in scans]


def _counts(
    scans: Sequence[_Scan],
    first: Sequence[NDArray[np.uint8]],
    second: Sequence[NDArray[np.uint8]],
    task: Task,
) -> list[PatientCounts]:
    found: dict[str, PatientCounts] = {}
    for scan, one, other in zip(scans, first, second, strict=True):
        found.setdefault(scan.patient, PatientCounts.none(len(task.classes))).add(one, other)
    return [*found.values()]


def _agreement(
    scans: Sequence[_Scan],
    before: Sequence[NDArray[np.uint8]],
    after: Sequence[NDArray[np.uint8]],
    task: Task,
) -> dict[str, Any]:
    counts = _counts(scans, before, after, task)
    values = [value for each in counts if (value := each.agreement) is not None]
    return {
        "worst": round(min(values), 5) if values else None,
        "mean": round(float(np.mean(values)), 5) if values else None,
        "emptied": sum(len(each.emptied) for each in counts),
    }


def _dice(scans: Sequence[_Scan], masks: Sequence[NDArray[np.uint8]], task: Task) -> float:
    """Mean over patients of Dice with the drawn masks, of those with a target or an answer."""
    drawn = [scan.drawn for scan in scans]
    found = [value for each in _counts(scans, drawn, masks, task) if (value := each.agreement) is not None]
    return round(float(np.mean(found)), 5)


def _times(graphs: Mapping[str, bytes], shape: Sequence[int], turns: int) -> dict[str, float]:
    """Median milliseconds of processor time of one run, in turns; OpenVINO's under `openvino: NAME`."""
    image = np.random.default_rng(0).normal(size=(1, *shape)).astype(np.float32)
    steps: dict[str, Callable[[], object]] = {}
    for name, graph in graphs.items():
        session = GraphSession(sha256(graph), graph, threads=1, device="cpu")
        steps[name] = partial(session.run_alone, image)
    for name in ("float32", "as served"):
        if (compiled := _openvino(graphs[name])) is not None:
            steps[f"openvino: {name}"] = partial(compiled, image)
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(turns + 2):
        for name, step in [*steps.items()][:: -1 if turn % 2 else 1]:
            began = time.process_time()
            step()
            taken[name].append(time.process_time() - began)
    return {name: round(1e3 * median(values[2:]), 4) for name, values in taken.items()}


def _openvino(graph: bytes) -> Callable[[NDArray[np.float32]], object] | None:
    try:
        import openvino  # type: ignore[import-not-found,unused-ignore]  # no dependency of Locum
    except ModuleNotFoundError:
        return None
    core = openvino.Core()
    settings = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    compiled: Callable[[NDArray[np.float32]], object] = core.compile_model(
        core.read_model(model=graph), "CPU", settings
    )
    return compiled


def _resized(graph: bytes) -> bytes:
    """The graph of a network of convolutions, for slices of another side: for its time alone."""
    model = parse_graph(graph, "graph")
    for value in (*model.graph.input, *model.graph.output):
        for side in value.type.tensor_type.shape.dim[2:]:
            side.dim_value = LARGE
    del model.graph.value_info[:]
    content: bytes = model.SerializeToString()
    return content


def _instructions() -> str:
    """The processor's instructions for products of 8-bit integers; Linux on x86 says them."""
    path = Path("/proc/cpuinfo")
    flags = path.read_text(encoding="utf-8").split() if path.exists() else []
    found = [name for name in ("avx2", "avx512bw", "avx_vnni", "avx512_vnni", "amx_int8") if name in flags]
    return ", ".join(found) or platform.machine()


def _section(rows: Sequence[Row]) -> list[str]:
    return [*_goal(rows), *_agreements(rows), *_costs(rows)]


def _arm(row: Row, name: str = "as served") -> Mapping[str, Any]:
    found: Mapping[str, Any] = row["result"]["arms"][name]
    return found


def _change(row: Row, name: str = "as served") -> float:
    """Points of Dice at the hospital that a recipe changes."""
    return 100 * float(_arm(row, name)["dice"] - _arm(row, "float32")["dice"])


def _faster(row: Row, size: str, arm: str, than: str = "float32") -> float | None:
    times = row["result"]["milliseconds"].get(size, {})
    return times[than] / times[arm] if arm in times else None


def _goal(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        arm, size = _arm(row), "large" if "large" in row["result"]["milliseconds"] else "own"
        ours, openvino = _faster(row, size, "as served"), _faster(row, size, "openvino: as served")
        lines.append(
            [
                row["cell"]["network"],
                row["cell"]["set"],
                _number(arm["worst"]),
                "yes" if (arm["worst"] or 0) >= LEAST_AGREEMENT else "no",
                f"{100 * _arm(row, 'float32')['dice']:.1f}",
                f"{_change(row):+.2f}",
                f"{ours:.2f}",
                "-" if openvino is None else f"{openvino:.2f}",
            ]
        )
    worst = min(map(_change, rows))
    said = (
        f"No hospital's Dice falls by more than 0.3 points: the largest change down is {worst:+.2f}."
        if worst >= -0.3
        else f"**The goal of at most 0.3 points of Dice is missed**: the largest change down is {worst:+.2f}."
    )
    refused = sum(line[3] == "no" for line in lines)
    return [
        "## The goal",
        "At least 2.5 times the scans per processor second, with no hospital's Dice below that of float32 by "
        "more than 0.3 points, and an agreement of 0.98 of the worst patient.",
        table(
            [
                "network",
                "set",
                "worst patient",
                "passes",
                "Dice, float32",
                "change",
                "onnxruntime, times as fast",
                "OpenVINO, times as fast",
            ],
            lines,
        ),
        f"Both columns of speed are over float32 in onnxruntime, at slices of {LARGE}x{LARGE} or at the own "
        f"patch of volumes. {said} The gate refuses {refused} of {len(lines)} graphs.",
        _speed(min(float(line[6]) for line in lines), [float(line[7]) for line in lines if line[7] != "-"]),
        f"The processor has {rows[0]['result']['instructions']}; another has another ratio: "
        "one without VNNI gains less.",
    ]


def _speed(slowest: float, others: Sequence[float]) -> str:
    """The least gain of speed in onnxruntime and in OpenVINO, against the goal."""
    reached = "the goal is reached" if slowest >= _GOAL else f"**the goal of {_GOAL} is missed** by it alone"
    said = f"onnxruntime is at least {slowest:.2f} times as fast: {reached}."
    if not others:
        return f"{said} OpenVINO was not installed in this run."
    reached = "the goal is reached" if min(others) >= _GOAL else "**the goal is missed by some networks**"
    return (
        f"{said} OpenVINO is at least {min(others):.2f} times as fast: {reached} with it "
        "(`LOCUM_DEVICE=openvino`)."
    )


def _agreements(rows: Sequence[Row]) -> list[str]:
    found: dict[tuple[object, object], str] = {}
    for row in rows:
        for name in row["cell"]["recipes"]:
            found[_of(row), name] = f"{_number(_arm(row, name)['worst'])} ({_change(row, name):+.2f})"
    arms = [(row, name) for row in rows for name in row["cell"]["recipes"]]
    emptied = sum(_arm(row, name)["emptied"] for row, name in arms)
    sizes = [_arm(row, name)["bytes"] / _arm(row, "float32")["bytes"] for row, name in arms]
    return [
        "## Recipes",
        "Agreement of the worst patient that did not calibrate (Dice with the float32 masks), and in "
        "brackets the change in points with the drawn masks. "
        f"Labels emptied: {emptied}. Bytes: {min(sizes):.2f} to {max(sizes):.2f} of float32's.",
        crossed("network and set", found),
        "As served: a scale per channel of the weights, which have 7 bits, the 99.999th percentile of "
        "activations, first and last convolution in float32. Another recipe differs in what its name says. "
        "The recipe was chosen on the first network here, without a label: only the others can confirm it. "
        "Of so few patients, recipes also differ by chance.",
    ]


def _costs(rows: Sequence[Row]) -> list[str]:
    found: dict[tuple[object, object], str] = {}
    for row in rows:
        for size, times in row["result"]["milliseconds"].items():
            side = "x".join(map(str, row["result"]["side"])) if size == "own" else f"{LARGE}x{LARGE}"
            for name, value in times.items():
                shown = f"{value:.2f} ms" if name == "float32" else f"{times['float32'] / value:.2f}"
                found[f"{_of(row)}, {side}", name] = shown
    return [
        "## Processor time of a run",
        "Milliseconds of float32, and how many times as fast each other graph is.",
        crossed("network, set, slice or patch", found),
    ]


def _of(row: Row) -> str:
    return f"{row['cell']['network']}, {row['cell']['set']}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
