from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor

from personalization.errors import ExportError
from personalization.iop_fl import export
from personalization.iop_fl.batch_norm import recalibrate_statistics
from personalization.iop_fl.export import to_dynamic_onnx
from personalization.iop_fl.network import route
from personalization.state import clone
from tests.helpers.personalization.routing_cases import images, moved, probabilities, space_of


def _run(graph: bytes, image: Tensor) -> Tensor:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    (result,) = session.run(["probabilities"], {"image": image.numpy()})
    return torch.from_numpy(np.asarray(result))


@pytest.mark.parametrize(("router", "batch_sizes"), [("direct", (1, 3)), ("pooled", (1,))])
def test_dynamic_graph_equals_torch(router: str, batch_sizes: tuple[int, ...]) -> None:
    space, drawn = space_of(2, torch.float32), images(4, dtype=torch.float32)
    network = moved(route(space, router))
    before = clone(network.state_dict())
    graph = to_dynamic_onnx(space, network, drawn)
    onnx.checker.check_model(graph)
    with torch.no_grad():
        expected = probabilities(recalibrate_statistics(space, network, drawn), drawn)
    assert float(expected.std()) > 0.01
    for size in batch_sizes:
        torch.testing.assert_close(_run(graph, drawn[:size]), expected[:size], atol=1e-5, rtol=0)
    assert network.training
    assert all(torch.equal(network.state_dict()[name], tensor) for name, tensor in before.items())
    assert graph == to_dynamic_onnx(space, network, drawn)


def test_pooled_graph_contains_its_routers_and_takes_one_image() -> None:
    space, drawn = space_of(2, torch.float32), images(2, dtype=torch.float32)
    network = moved(route(space, "pooled"))
    model = onnx.load_from_string(to_dynamic_onnx(space, network, drawn))
    assert [node.op_type for node in model.graph.node].count("Sigmoid") == 23
    sides = [d.dim_param or d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    assert sides == [1, 2, 32, 48]


def test_export_of_experts_larger_than_one_file_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    space, drawn = space_of(1, torch.float32), images(1, dtype=torch.float32)
    monkeypatch.setattr(export, "LARGEST_BYTES", 10_000)
    with pytest.raises(ExportError, match=r"10000 bytes for one onnx file, found \d+ of the 2 experts"):
        to_dynamic_onnx(space, route(space), drawn)
