"""The exported graph of a pool, run by onnxruntime."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from personalization.export import to_onnx
from personalization.fedins import InstanceAdaptive
from service.inference.loading import split_at_query
from service.inference.sessions import GraphSession
from tests.unit.personalization.fedins.test_pool import BACKBONES, SIDE, adaptive, images


def to_graph(network: InstanceAdaptive) -> bytes:
    return to_onnx(network, network.backbone.in_channels, (SIDE, SIDE))


def _session(graph: bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("kind", BACKBONES)
def test_exported_pool_equals_torch(kind: str) -> None:
    network = adaptive(kind)
    with torch.no_grad():
        network.pool.centre.copy_(network.query(images(8, seed=9)).mean(0))
    graph = to_graph(network)
    assert graph == to_graph(network)
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


@pytest.mark.parametrize("kind", BACKBONES)
def test_graph_split_at_query_equals_whole_graph_and_accepts_a_given_query(kind: str) -> None:
    network = adaptive(kind)
    graph, own = to_graph(network), images(5)
    whole = _session(graph).run(None, {"image": own.numpy()})
    served = GraphSession("pool", graph, threads=1, device="cpu")
    assert served.has_pool
    answer = served.run(own.numpy())
    answered = (answer.probabilities, answer.entries, answer.similarities)
    for found, expected in zip(answered, whole[:3], strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
    queries = served.queries(own.numpy())
    np.testing.assert_allclose(queries, whole[3], atol=1e-5)
    # All slices of a volume share entries, selected by the mean of their queries.
    mean = queries.mean(0, keepdims=True)
    with torch.no_grad():
        shared = network.answer(own, torch.from_numpy(mean))
    alike = served.run_alone(own.numpy(), mean)
    assert alike.entries is not None
    np.testing.assert_array_equal(alike.entries, shared.picked.entries.expand(5, 3).numpy())
    assert (alike.entries != whole[1]).any()
    np.testing.assert_allclose(alike.probabilities, shared.logits.softmax(1).numpy(), atol=1e-5)


@pytest.mark.parametrize("kind", BACKBONES)
def test_split_graphs_share_their_weights_in_memory(kind: str) -> None:
    graph = to_graph(adaptive(kind))
    asking, answering = split_at_query(graph, onnx.load_from_string(graph))
    assert asking.weights
    assert all(answering.weights[name] is weight for name, weight in asking.weights.items())
    small = [
        len(tensor.raw_data)
        for part in (asking, answering)
        for tensor in onnx.load_from_string(part.graph).graph.initializer
    ]
    assert max(small) < 1024


@pytest.mark.parametrize("kind", BACKBONES)
def test_graph_stores_the_backbone_weights_once(kind: str) -> None:
    network = adaptive(kind)
    model = onnx.load_from_string(to_graph(network))
    stored = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    once = sum(tensor.numel() * tensor.element_size() for tensor in network.state_dict().values())
    assert 0.8 * once < stored < 1.15 * once


def test_graph_breaks_ties_towards_the_lower_entry() -> None:
    network = adaptive("unet")
    with torch.no_grad():
        network.pool.keys.copy_(network.pool.keys[:1].expand_as(network.pool.keys))
    (entries,) = _session(to_graph(network)).run(["entries"], {"image": images(2).numpy()})
    assert entries.tolist() == [[0, 1, 2], [0, 1, 2]]
