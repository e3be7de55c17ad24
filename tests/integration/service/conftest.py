"""A real API over real HTTP, and what it serves."""

from __future__ import annotations

import fcntl
import io
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from model_store.artefact import Artefact
from model_store.manifest import GRAPH, WEIGHTS, Lineage, ModelManifest, NetworkSpec
from model_store.store import Store
from model_store.task import Normalisation, Task
from service.settings import Settings
from tests.helpers.service.api import NO_REDIS, Api, running
from tests.helpers.service.clusters_federation import publish_clusters
from tests.helpers.service.joining_federation import publish_cross_attention
from tests.helpers.service.routing_federation import publish_routing_space

THRESHOLD = 100
BRIGHT = Task(
    name="bright",
    labels={"bright": (1,)},
    normalisation=Normalisation(method="none"),
    size=(32, 32),
    colour="luminance",
)


DARK = Task(
    name="dark",
    kind="classification",
    class_names=("dark", "bright"),
    normalisation=Normalisation(method="none"),
    size=(28, 28),
    colour="luminance",
)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Api]]:
    """`start(store, **settings)`: an API on that store, with its own state folder, while the module lasts."""
    begun: list[Api] = []
    with ExitStack() as stack:

        def begin(store: Path, **settings: object) -> Api:
            state = tmp_path_factory.mktemp("state")
            chosen = {"device": "cpu", "threads": 1, "redis_url": NO_REDIS, **settings}
            begun.append(stack.enter_context(running(Settings(store=store, state_dir=state, **chosen))))  # type: ignore[arg-type]
            return begun[-1]

        yield begin
        # Each takes a third of a second to stop: all at once, not one after the other.
        for api in begun:
            api.server.should_exit = True


@pytest.fixture(scope="session")
def publish_bright(threshold_graph: Callable[..., bytes]) -> Callable[..., Artefact]:
    """`publish_bright(root, name="bright", at=100, **manifest)`: a model that marks what is brighter."""

    def publish(root: Path, name: str = "bright", at: float = THRESHOLD, **fields: object) -> Artefact:
        manifest = ModelManifest(
            **{  # type: ignore[arg-type]
                "name": name,
                "task": BRIGHT,
                "network": NetworkSpec(name="threshold", arguments={"at": at}),
                "lineage": Lineage(method="by-hand", run="test", sites=(), rounds=0, seed=0),
                **fields,
            }
        )
        graph = threshold_graph(at=at, slope=0.5)
        return Store(root).publish(manifest, {WEIGHTS: b"none", GRAPH: graph})

    return publish


@pytest.fixture(scope="session")
def publish_dark(mean_graph: Callable[..., bytes]) -> Callable[..., Artefact]:
    """`publish_dark(root, name="dark", at=100, **manifest)`: a classifier of images by their mean intensity.

    p(bright) = sigmoid(0.1 (mean - at)).
    """

    def publish(root: Path, name: str = "dark", at: float = THRESHOLD, **fields: object) -> Artefact:
        manifest = ModelManifest(
            **{  # type: ignore[arg-type]
                "name": name,
                "task": DARK,
                "network": NetworkSpec(name="mean", arguments={"at": at}),
                "lineage": Lineage(method="by-hand", run="test", sites=(), rounds=0, seed=0),
                **fields,
            }
        )
        graph = mean_graph(at=at, slope=0.1, channels=manifest.task.in_channels)
        return Store(root).publish(manifest, {WEIGHTS: b"none", GRAPH: graph})

    return publish


def png(pixels: NDArray[np.generic]) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def nifti(voxels: NDArray[np.generic], affine: NDArray[np.float64] | None = None) -> bytes:
    """Uncompressed NIfTI-1."""
    image = nib.Nifti1Image(voxels, np.eye(4) if affine is None else affine)
    image.header.set_xyzt_units("mm")
    content: bytes = image.to_bytes()
    return content


@pytest.fixture(scope="session")
def make_png() -> Callable[..., bytes]:
    """Pixels -> the bytes of a PNG."""
    return png


@pytest.fixture(scope="session")
def make_nifti() -> Callable[..., bytes]:
    """(voxels, affine) -> the bytes of a .nii."""
    return nifti


@pytest.fixture(scope="session")
def picture() -> NDArray[np.uint8]:
    """[32, 32] grey, about half of it brighter than the threshold, nothing near it."""
    pixels = np.random.default_rng(3).integers(0, 200, (32, 32), np.uint8)
    return np.where(abs(pixels.astype(int) - THRESHOLD) < 5, 0, pixels).astype(np.uint8)


@pytest.fixture(scope="session")
def organ_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with `organ`: a small U-Net really trained (some 10 s) on patients of two phantom scanners."""
    return trained_once(tmp_path_factory, "organ", train_organ)


@pytest.fixture(scope="session")
def routing_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the routing space `organ`, really trained (some 10 s); see `routing_federation`.

    Not to be written to: `shutil.copytree` it for a test that publishes.
    """
    return trained_once(tmp_path_factory, "routing", publish_routing_space)


@pytest.fixture(scope="session")
def joining_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the cross-attention `tumour`, really trained; see `joining_federation`. Copy it, too."""
    return trained_once(tmp_path_factory, "joining", publish_cross_attention)


@pytest.fixture(scope="session")
def clusters_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the clusters `shapes` and `stains`, really trained (some 10 s); see `clusters_federation`.

    Copy it, too.
    """
    return trained_once(tmp_path_factory, "clusters", publish_clusters)


def trained_once(factory: pytest.TempPathFactory, name: str, train: Callable[[Path], None]) -> Path:
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        # Shared by the workers of one run, so that one trains and the others wait for it.
        folder = folder.parent
    store = folder / name
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not Store(store).versions.names():
            train(store)
    return store


def train_organ(root: Path) -> None:
    import torch
    from scipy.spatial.transform import Rotation

    from model_store.preprocessing import prepare, prepare_mask
    from model_store.scan import Scan
    from personalization.export import to_onnx
    from personalization.losses import soft_dice_loss
    from personalization.networks import build
    from personalization.state import to_safetensors
    from training.phantom import SCANNERS, TASK, make_volume

    # Fields of view of 91 to 144 mm, every third volume oblique: the network has seen organs of these sizes,
    # and corners that were never acquired.
    rng = np.random.default_rng(0)
    images, targets = [], []
    for number in range(30):
        oblique, shape = number % 3 == 2, (48, 48, 10)
        turn = Rotation.from_rotvec(rng.uniform(-25, 25, 3) * oblique, degrees=True).as_matrix()
        pixel = rng.uniform(1.9, 2.4 if oblique else 3.0)
        affine = np.eye(4)
        affine[:3, :3] = turn * (pixel, pixel, 4.6)
        affine[:3, 3] = -affine[:3, :3] @ ((np.array(shape) - 1) / 2)
        voxels, mask = make_volume(SCANNERS["aster" if number % 4 < 2 else "birch"], number, affine, shape)
        prepared = prepare(Scan(voxels[..., None], affine, "nifti"), TASK)
        images.append(prepared.slices)
        targets.append(prepare_mask(Scan(mask[..., None], affine, "nifti"), TASK, prepared.geometry))
    image, target = torch.from_numpy(np.concatenate(images)), torch.from_numpy(np.concatenate(targets))

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = build("unet", in_channels=1, classes=2, width=4)
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-2)
    steps = 140
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        chosen = torch.randint(len(image), (16,), generator=generator)
        logits, truth = network(image[chosen]), target[chosen]
        loss = soft_dice_loss(logits, truth) + torch.nn.functional.cross_entropy(logits, truth.long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    manifest = ModelManifest(
        name="organ",
        task=TASK,
        network=NetworkSpec(name="unet", arguments={"in_channels": 1, "classes": 2, "width": 4}),
        lineage=Lineage(method="by-hand", run="test", sites=("aster", "birch"), rounds=1, seed=0),
    )
    graph = to_onnx(network, 1, TASK.size)
    Store(root).publish(manifest, {WEIGHTS: to_safetensors(network.state_dict()), GRAPH: graph})
