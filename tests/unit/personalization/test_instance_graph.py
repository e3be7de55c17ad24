"""The served graph of a pool, run by onnxruntime."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from personalization.instance.graph import to_graph
from tests.unit.personalization.test_instance import BACKBONES, SIDE, adaptive, images


def _session(graph: bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("kind", BACKBONES)
def test_onnx_equals_torch(kind: str) -> None:
    network = adaptive(kind)
    with torch.no_grad():
        network.pool.centre.copy_(network.query(images(8, seed=9)).mean(0))
    graph = to_graph(network, (SIDE, SIDE))
    assert graph == to_graph(network, (SIDE, SIDE))
    session = _session(graph)
    assert [node.name for node in session.get_inputs()] == ["image"]
    own = images(5)
    with torch.no_grad():
        expected, query = network.answer(own), network.query(own)
        probabilities, entries, similarities, asked = session.run(None, {"image": own.numpy()})
        np.testing.assert_allclose(probabilities, expected.logits.softmax(1).numpy(), atol=1e-5)
        np.testing.assert_array_equal(entries, expected.picked.entries.numpy())
        np.testing.assert_allclose(similarities, expected.picked.similarities.numpy(), atol=1e-5)
        np.testing.assert_allclose(asked, query.numpy(), atol=1e-5)
        alone = [session.run(["probabilities"], {"image": image[None].numpy()})[0] for image in own]
        np.testing.assert_allclose(np.concatenate(alone), probabilities, atol=1e-5)
        # All slices of a volume alike: first the queries, then their mean for all.
        nothing, _, _, asked = session.run(None, {"image": own.numpy(), "only_query": np.array(True)})
        assert nothing.shape[0] == 0
        mean = asked.mean(0, keepdims=True)
        shared = network.answer(own, torch.from_numpy(mean))
        probabilities, entries, _, _ = session.run(None, {"image": own.numpy(), "given_query": mean})
        np.testing.assert_array_equal(entries, shared.picked.entries.numpy())
        assert entries.shape == (1, 3)
        np.testing.assert_allclose(probabilities, shared.logits.softmax(1).numpy(), atol=1e-5)


@pytest.mark.parametrize("kind", BACKBONES)
def test_weights_of_the_backbone_lie_in_the_graph_once(kind: str) -> None:
    network = adaptive(kind)
    model = onnx.load_from_string(to_graph(network, (SIDE, SIDE)))
    stored = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    inside = [
        attribute.t
        for node in model.graph.node
        for branch in node.attribute
        if branch.HasField("g")
        for inner in branch.g.node
        for attribute in inner.attribute
        if attribute.HasField("t")
    ]
    constants = sum(len(tensor.raw_data) for tensor in inside)
    once = sum(tensor.numel() * tensor.element_size() for tensor in network.state_dict().values())
    assert 0.8 * once < stored + constants < 1.15 * once


def test_ties_go_to_the_lower_entry_in_the_graph_too() -> None:
    network = adaptive("unet")
    with torch.no_grad():
        network.pool.keys.copy_(network.pool.keys[:1].expand_as(network.pool.keys))
    (entries,) = _session(to_graph(network, (SIDE, SIDE))).run(["entries"], {"image": images(2).numpy()})
    assert entries.tolist() == [[0, 1, 2], [0, 1, 2]]
