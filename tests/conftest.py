"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import benchmarks.harness.forked  # noqa: F401  (before any server to fork from is started)
from tests.helpers import reaper

# Set before torch is imported: tests run in parallel, and a test that used every core would slow the others.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Collection makes a million objects, and none is garbage: to look for some took two fifths of its time.
gc.disable()


def pytest_collection_finish() -> None:
    """Look for garbage from here on, among what the tests make."""
    gc.freeze()
    gc.enable()


def pytest_sessionstart() -> None:
    """What the tests start ends with this process, and hears Ctrl-C where a shell's background would not."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    reaper.watch()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests of `-m gpu` skip where no GPU is, and fail where one is that the named library cannot use."""
    marker = item.get_closest_marker("gpu")
    if marker is not None:
        from tests.helpers.gpu import need_gpu

        need_gpu(*(marker.args or ("torch",)))


_REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real medical images; tests that need it are skipped on a machine without it."""
    root = Path(os.environ.get("LOCUM_DATA", _REPOSITORY.parent / "shared" / "data"))
    if not (root / "manifest.json").is_file():
        pytest.skip(f"no real data in {root} (set LOCUM_DATA)")
    return root


@pytest.fixture(scope="session")
def phantom_federation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small read-only phantom federation: aster, birch, cedar, four patients each, 32x32."""
    from training.phantom import write_federation

    root = tmp_path_factory.mktemp("phantom")
    return write_federation(root, ("aster", "birch", "cedar"), patients_per_site=4, size=32, seed=0)


@pytest.fixture(scope="session")
def threshold_graph() -> Callable[..., bytes]:
    """`threshold_graph(at=0.5)`: the onnx file of a two-class network, certain of foreground above `at`.

    logits = (0, 8 (x - at)), so p(foreground) = sigmoid(8 (x - at)).
    """

    import onnx
    from onnx import TensorProto, helper

    def build(at: float = 0.5, slope: float = 8.0, output: str = "probabilities") -> bytes:
        weights = helper.make_tensor("w", TensorProto.FLOAT, [2, 1, 1, 1], [0.0, slope])
        bias = helper.make_tensor("b", TensorProto.FLOAT, [2], [0.0, -slope * at])
        nodes = [
            helper.make_node("Conv", ["image", "w", "b"], ["logits"], kernel_shape=[1, 1]),
            helper.make_node("Softmax", ["logits"], [output], axis=1),
        ]
        graph = helper.make_graph(
            nodes,
            "threshold",
            [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["B", 1, "H", "W"])],
            [helper.make_tensor_value_info(output, TensorProto.FLOAT, ["B", 2, "H", "W"])],
            [weights, bias],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
        onnx.checker.check_model(model)
        content: bytes = model.SerializeToString()
        return content

    return build


@pytest.fixture(scope="session")
def mean_graph() -> Callable[..., bytes]:
    """`mean_graph(at=0.5)`: the onnx file of a two-class classifier by an image's mean m over its channels.

    logits = (0, 8 (m - at)), so p(second class) = sigmoid(8 (m - at)).
    """

    import onnx
    from onnx import TensorProto, helper

    def build(at: float = 0.5, slope: float = 8.0, channels: int = 1) -> bytes:
        initializers = [
            helper.make_tensor("axes", TensorProto.INT64, [3], [1, 2, 3]),
            helper.make_tensor("w", TensorProto.FLOAT, [1, 2], [0.0, slope]),
            helper.make_tensor("b", TensorProto.FLOAT, [2], [0.0, -slope * at]),
            helper.make_tensor("shape", TensorProto.INT64, [2], [-1, 1]),
        ]
        nodes = [
            helper.make_node("ReduceMean", ["image", "axes"], ["mean"], keepdims=0),
            helper.make_node("Reshape", ["mean", "shape"], ["column"]),
            helper.make_node("Gemm", ["column", "w", "b"], ["logits"]),
            helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
        ]
        graph = helper.make_graph(
            nodes,
            "mean",
            [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["B", channels, "H", "W"])],
            [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["B", 2])],
            initializers,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
        onnx.checker.check_model(model)
        content: bytes = model.SerializeToString()
        return content

    return build


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """An S3 server on loopback; the environment names it."""
    from tests.helpers.model_store.s3_server import s3_server

    with s3_server() as url:
        yield url


@pytest.fixture
def bucket_url(s3: str) -> str:
    """A new, empty bucket, with a prefix."""
    from tests.helpers.model_store.s3_server import make_bucket

    return f"s3://{make_bucket(s3)}/locum/store"
