"""Two-dimensional artefacts of methods and recipes are as recorded, in `frozen_artefacts.json` beside this.

Where the probe of the kernels gives the recorded bits, so does every file. Elsewhere every tensor of a state
and of a graph is compared, with a stated room, and graphs by their structure. `tools/same-artefacts` compares
two commits on one machine, and runs the cases of both. To record again, after a change on purpose:
`python -m tests.integration.training.test_frozen_artefacts`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from model_store.artefact import Artefact
from model_store.manifest import WEIGHTS
from model_store.store import Store
from personalization.export import to_onnx
from personalization.iop_fl.export import to_dynamic_onnx
from personalization.iop_fl.network import route
from personalization.iop_fl.space import RoutingSpace
from personalization.options.presets import PRESETS
from personalization.state import from_safetensors, to_safetensors
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.recipe import recipe_of
from tests.helpers.training.backbones import publish as publish_backbone
from tests.helpers.training.backbones import unet
from tests.helpers.training.interrupting import interrupted
from tests.helpers.training.sketches import apart, digest, probe, sketch, structure
from training.config import RunConfig
from training.data.federation import load_federation
from training.methods.fedins.config import FedInsConfig
from training.methods.registry import method, methods
from training.phantom import write_federation
from training.phantom.shapes import write_shapes
from training.run import Run, execute

RECORDED = Path(__file__).with_name("frozen_artefacts.json")
# Small, so that all of them take seconds. The best model of so few rounds is the first, untrained.
LAST: dict[str, Any] = {"selection": "last"}
ADAM: dict[str, Any] = {"width": 2, "rounds": 2, "batch_size": 8, "local_steps": 2, **LAST}
# Adam divides a gradient by its own size, though it be rounding, as that of a bias before a batch norm: what
# two processors train is further apart by it. A tenth more of these steps is far outside of the room.
FEW: dict[str, Any] = {**ADAM, "optimiser": "sgd", "learning_rate": 0.5}
# Where such steps would make more of rounding: many on one batch, or gradients through one another.
SLOW: dict[str, Any] = {**FEW, "learning_rate": 0.02}
ONE_SHOT: dict[str, Any] = {"width": 2, "local_epochs": 1, "epochs": 2, "synthesis_batch": 8}
GENERATED: dict[str, Any] = {**ONE_SHOT, "generator_steps": 1, "generator_width": 4, "noise_size": 8}
CROSS_ATTENTION: dict[str, Any] = {
    **{"width": 2, "heads": 4, "groups": 8, "rounds": 2, "local_steps": 1, "fine_tune_rounds": 1},
    **LAST,
}
# Method, and its kind of task where it is not the first that it is for: its configuration.
METHODS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            *("ditto", "fedadagrad", "fedadam", "fedavg", "fedavgm"),
            *("fedbn", "feddc", "fedper", "fedprox", "fedrep", "fedsoup", "fedyogi", "local-only"),
            *("moon", "scaffold"),
        ),
        FEW,
    ),
    "centralised": ADAM,
    "co-boosting": GENERATED,
    "dafl": GENERATED,
    "dense": GENERATED,
    "fedbicross": {
        **{**ONE_SHOT, "probes": 16, "steps": 4, "outer_steps": 2, "personal_epochs": 1},
        # Adam's steps on images, of which most pixels have next to no gradient.
        "image_rate": 0.001,
    },
    "fedavg@classification": {**SLOW, "width": 4},
    "feddg": SLOW,
    "feddp": CROSS_ATTENTION,
    "fedins": {"rounds": 1, "local_epochs": 1, "learning_rate": 0.03, "entries": 4, "top": 2, **LAST},
    "fedisca": {**ONE_SHOT, "steps": 4},
    "fedoap": CROSS_ATTENTION,
    "pfedme": SLOW,
    "iop-fl": {**FEW, "recipe": "paper"},
}
# Not interrupted here: methods that remember what others do (the moments of FedYogi, the parts of FedPer, no
# more than SCAFFOLD), and those that other tests kill or interrupt: `engine/test_resume` and `methods`.
ALIKE = {"fedadagrad", "fedadam", "fedavgm", "fedbn", "fedrep", "fedavg", "fedavg@classification", "fedprox"}
ELSEWHERE = {"iop-fl", "fedbicross", "fedoap", "feddp", "dense", "co-boosting"}
RECIPES = ("ladder", "intent", "paper", "official", "as-published", "statistics", "tent")
FOLDERS: list[str] = []


def frozen(files: Mapping[str, bytes]) -> dict[str, Any]:
    """What is recorded of every file."""
    return {
        "digests": {name: digest(content) for name, content in sorted(files.items())},
        "structures": {name: structure(name, content) for name, content in sorted(files.items())},
        "sketches": {name: sketch(name, content) for name, content in sorted(files.items())},
    }


def run_of(case: str) -> tuple[Run, Store, Path]:
    """A run of a method on a tiny phantom, with a store and a folder of its own."""
    root = Path(tempfile.mkdtemp(dir=FOLDERS[-1]))
    name, _, kind = case.partition("@")
    registered, config = method(name), dict(METHODS[case])
    if (kind or registered.kinds[0]) == "segmentation":
        # Cross-attention needs a map of 2 by 2.
        side = 32 if "heads" in config else 16
        data = write_federation(root / "data", ("aster", "birch", "cedar"), 3, side)
    else:
        data = write_shapes(root / "data", images_per_site=12)
    federation, store = load_federation(data), Store(root / "store")
    settings = registered.config(**config)
    if isinstance(settings, FedInsConfig):
        publish_backbone(store.root, federation.task, unet(federation.task))
        settings = settings.model_copy(update={"backbone": "base"}).pinned(store, federation.task, "frozen")
    run = Run(federation, name, settings, RunConfig(seed=4, consent="all"))
    return run, store, root / "run"


@cache
def made(case: str) -> tuple[Artefact, ...]:
    """The artefacts of that run."""
    run, store, root = run_of(case)
    return execute(run, root, workers=0, store=store, name="frozen").artefacts


@cache
def space() -> RoutingSpace:
    """That of IOP-FL's artefacts."""
    models = {
        artefact.manifest.site: from_safetensors(artefact.read(WEIGHTS))
        for artefact in made("iop-fl")
        if artefact.manifest.kind == "model"
    }
    network = made("iop-fl")[0].manifest.network
    inside = {site: state for site, state in models.items() if site is not None}
    return RoutingSpace.of(network.name, network.arguments, inside, models[None])


def of_method(name: str) -> dict[str, Any]:
    """Weights and graphs of all artefacts, in order, without their JSON."""
    files = {
        f"{artefact.name}/{path}": artefact.read(path)
        for artefact in made(name)
        for path in artefact.manifest.files
        if path.endswith((".safetensors", ".onnx"))
    }
    return frozen(files)


def of_recipe(preset: str) -> dict[str, Any]:
    """What a preset serves after two epochs on seven images."""
    images = torch.randn(7, 1, 16, 16, generator=torch.Generator().manual_seed(3))
    router = PRESETS[preset].router or "direct"
    config = AdaptationConfig(preset=preset, epochs=2, batch_size=4, router=router, seed=5)
    adapted = recipe_of(preset).adapt(space(), images, config, torch.device("cpu"))
    graph = to_onnx(adapted.merged, 1, (16, 16))
    return frozen({"state.safetensors": to_safetensors(adapted.merged.state_dict()), "graph.onnx": graph})


def of_routing(router: Any) -> dict[str, Any]:
    """The graph that routes scan by scan."""
    images = torch.randn(4, 1, 16, 16, generator=torch.Generator().manual_seed(3))
    network = route(space(), router)
    return frozen({"graph.onnx": to_dynamic_onnx(space(), network, images)})


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"method {name}": partial(of_method, name) for name in METHODS},
    **{f"preset {name}": partial(of_recipe, name) for name in RECIPES},
    **{f"routing {name}": partial(of_routing, name) for name in ("direct", "pooled")},
}


@pytest.fixture(scope="module", autouse=True)
def folder() -> Iterator[None]:
    with in_one_folder():
        yield


@contextmanager
def in_one_folder() -> Iterator[None]:
    """Everything in one folder, on one thread: sums depend on how they are split."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        FOLDERS.append(root)
        yield
    FOLDERS.clear()
    made.cache_clear()
    space.cache_clear()
    torch.set_num_threads(threads)


def test_all_of_these_methods_and_presets_are_there() -> None:
    assert recorded()["cases"].keys() == CASES.keys()
    assert {name.partition("@")[0] for name in METHODS} == {*methods()}
    assert {*RECIPES} <= PRESETS.keys()


@pytest.mark.parametrize("case", CASES)
def test_artefact_is_as_recorded(case: str) -> None:
    found, wanted = CASES[case](), recorded()["cases"][case]
    assert found["digests"].keys() == wanted["digests"].keys()
    if probed() == recorded()["probe"]:
        assert found["digests"] == wanted["digests"]
    # An exporter of another version may name and order the nodes of a graph otherwise.
    same = exporters() == recorded()["exporters"]
    for name, expected in wanted["sketches"].items():
        if same or not name.endswith(".onnx"):
            assert found["structures"][name] == wanted["structures"][name], name
            assert apart(found["sketches"][name], expected) <= 1, name


@pytest.mark.parametrize("case", [case for case in METHODS if case not in ALIKE | ELSEWHERE])
def test_a_run_interrupted_in_every_round_publishes_the_same_bytes(case: str) -> None:
    run, store, root = run_of(case)
    result, interruptions = interrupted(run, root, store, "frozen")
    assert interruptions == len(result.history)
    assert [artefact.digest for artefact in result.artefacts] == [artefact.digest for artefact in made(case)]


def test_a_tenth_more_of_the_learning_rate_is_outside_of_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "fedavg@segmentation", {**FEW, "learning_rate": 0.55})
    found, wanted = of_method("fedavg@segmentation"), recorded()["cases"]["method fedavg"]
    assert found["structures"] == wanted["structures"]
    for name, expected in wanted["sketches"].items():
        assert apart(found["sketches"][name], expected) > 2, name


@cache
def probed() -> dict[str, str]:
    return probe()


def exporters() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "onnx")}


@cache
def recorded() -> Any:
    return json.loads(RECORDED.read_text(encoding="utf-8"))


def record() -> None:
    """Write what is found now."""
    with in_one_folder():
        found = {name: case() for name, case in CASES.items()}
        head = {"exporters": exporters(), "probe": probe()}
    # A line for each case.
    cases = ",\n".join(f"  {json.dumps(name)}: {json.dumps(case)}" for name, case in found.items())
    text = f'{json.dumps(head, indent=1)[:-2]},\n "cases": {{\n{cases}\n }}\n}}\n'
    RECORDED.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    record()
