from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch

from personalization.errors import NetworkError
from personalization.export import to_onnx
from personalization.fedoap.parts import bank_state, split
from personalization.networks import FedOapUNet, build, initialise

SITES = ("A", "B", "C")


def network(sites: tuple[str, ...] = (), absent: tuple[str, ...] = (), **options: object) -> FedOapUNet:
    """A small network with one bank entry per site; a site's entry does not depend on the other sites."""
    arguments = {"in_channels": 1, "width": 2, "heads": 4, "groups": 8, **options}
    drawn = initialise(build("fedoap", **arguments), torch.Generator().manual_seed(1))
    entries = {}
    for seed, site in enumerate(SITES):
        generator = torch.Generator().manual_seed(seed)
        entries[site] = {name: torch.randn(4, 32, generator=generator) for name in ("key", "value")}
    bank = bank_state({site: entries[site] for site in sites}, 32, absent)
    result = build("fedoap", **arguments, sites=len(sites), tokens=4 if sites else 0)
    result.load_state_dict({**drawn.state_dict(), **bank})
    assert isinstance(result, FedOapUNet)
    return result


def images(count: int = 3, size: int = 32) -> torch.Tensor:
    return torch.randn(count, 1, size, size, generator=torch.Generator().manual_seed(9))


def parameters(**options: object) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in build("fedoap", in_channels=1, **options).parameters())


def test_plain_backbone_has_the_published_number_of_parameters():
    """31,030,593 parameters, 118.37 MiB as float32 (Table 4)."""
    plain = parameters(width=64, attention=False, adapter=False)
    assert plain == 31_030_593
    assert round(plain * 4 / 2**20, 2) == 118.37


def test_shared_part_is_backbone_with_three_projections_and_a_norm():
    with torch.device("meta"):
        state = build("fedoap", in_channels=1).state_dict()
    shared, personal = split(state)
    assert sum(t.numel() for t in shared.values()) == 31_030_593 + 3 * (1024 * 1024 + 1024) + 2 * 1024
    assert {name.split(".")[0] for name in personal} == {"query_stage", "to_query", "adapter"}
    assert sum(t.numel() for n, t in personal.items() if n.startswith("adapter.")) == 73_856
    own = split(state, own_keys=True)[1].keys() - personal.keys()
    assert {name.split(".")[0] for name in own} == {"keyvalue_stage", "to_key", "to_value"}
    assert not set(shared) & {"bank_key", "bank_value", "bank_present"}


def test_softmax_of_two_classes_equals_sigmoid_of_the_logit():
    net = network(SITES)
    logits, mass = net.segment(images())
    assert logits.shape == (3, 1, 32, 32)
    probabilities = torch.softmax(net(images()), dim=1)
    torch.testing.assert_close(probabilities[:, 1:], torch.sigmoid(logits))
    assert mass.shape == (3, 4)
    torch.testing.assert_close(mass.sum(1), torch.ones(3))


@pytest.mark.parametrize("absent", [("A",), ("A", "C"), SITES])
def test_absent_site_gives_the_result_of_a_bank_without_it(absent):
    """A member attends to K-1 of K entries, an outside hospital to all of them."""
    masked, mass = network(SITES, absent).segment(images())
    kept = tuple(site for site in SITES if site not in absent)
    without, fewer = network(kept).segment(images())
    torch.testing.assert_close(masked, without)
    torch.testing.assert_close(mass[:, [0, *(1 + SITES.index(site) for site in kept)]], fewer)
    assert float(mass[:, [1 + SITES.index(site) for site in absent]].abs().max()) == 0


def test_bank_tokens_of_other_sites_change_the_logits():
    whole, some = network(SITES).segment(images())[0], network(("A",)).segment(images())[0]
    assert float((whole - some).detach().abs().max()) > 1e-4


def test_bottleneck_equals_torch_multi_head_attention():
    """GroupNorm(z_q + W_o attention(W_q z_q, ...)) with torch's own multi-head attention."""
    net = network().eval()
    pooled = torch.randn(2, 16, 2, 2, generator=torch.Generator().manual_seed(2))
    mixed, _ = net._bottleneck(pooled)
    query, shared = net.query_stage(pooled), net.keyvalue_stage(pooled)
    reference = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    reference.load_state_dict(
        {
            "in_proj_weight": torch.cat([net.to_query.weight, net.to_key.weight, net.to_value.weight])[
                ..., 0, 0
            ],
            "in_proj_bias": torch.cat([net.to_query.bias, net.to_key.bias, net.to_value.bias]),
            "out_proj.weight": net.to_output.weight[..., 0, 0],
            "out_proj.bias": net.to_output.bias,
        }
    )
    tokens = [x.flatten(2).transpose(1, 2) for x in (query, shared, shared)]
    attended = reference(*tokens)[0].transpose(1, 2).reshape(2, 32, 2, 2)
    expected = torch.nn.functional.group_norm(query + attended, 8)
    torch.testing.assert_close(mixed, expected, rtol=1e-4, atol=1e-5)


def test_each_architecture_option_changes_the_logits():
    default = network(SITES).segment(images())[0]
    for options in (
        {"norm": "output"},
        {"residual": False},
        {"heads": 1},
        {"groups": 16},
        {"convolutions": 1},
    ):
        other = network(SITES, **options).segment(images())[0]
        assert float((other - default).detach().abs().max()) > 1e-5, options


def test_keys_and_values_equal_the_tokens_used_by_attention():
    net = network()
    key, value = net.keys_and_values(images())
    assert key.shape == value.shape == (3, 4, 32)
    seen = {}
    net.to_key.register_forward_hook(lambda module, given, result: seen.update(key=result))
    net(images())
    torch.testing.assert_close(key[1, 2], seen["key"][1, :, 1, 0])  # token 2 of 2x2 is row 1, column 0


@pytest.mark.parametrize("attention", [True, False])
def test_onnx_equals_torch_at_any_batch_size(attention):
    net = network(SITES if attention else (), ("B",), attention=attention) if attention else plain()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        to_onnx(net, 1, (32, 48)), options, providers=["CPUExecutionProvider"]
    )
    names = ["probabilities", "attention"] if attention else ["probabilities"]
    assert [output.name for output in session.get_outputs()] == names
    for count in (1, 3):
        image = torch.randn(count, 1, 32, 48, generator=torch.Generator().manual_seed(count))
        found = session.run(None, {"image": image.numpy()})
        with torch.no_grad():
            logits, *extras = net.forward_with_extras(image)
        for got, expected in zip(found, [torch.softmax(logits, dim=1), *extras], strict=True):
            np.testing.assert_allclose(got, expected.numpy(), atol=1e-5)
        assert found[0].std() > 0.01


def plain() -> FedOapUNet:
    net = build("fedoap", in_channels=1, width=2, attention=False, adapter=False)
    return initialise(net, torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shape", [(1, 1, 16, 32), (1, 1, 40, 32), (1, 2, 32, 32), (1, 32, 32)])
def test_image_of_wrong_shape_is_rejected(shape):
    with pytest.raises(NetworkError, match="fedoap: "):
        network()(torch.zeros(shape))


@pytest.mark.parametrize(
    "options", [{"heads": 3}, {"groups": 5}, {"norm": "x"}, {"convolutions": 3}, {"width": 0}]
)
def test_invalid_argument_is_rejected(options):
    with pytest.raises(NetworkError, match="fedoap: "):
        build("fedoap", **{"in_channels": 1, "width": 2, **options})


def test_keys_and_values_without_attention_is_rejected():
    with pytest.raises(NetworkError, match="without attention"):
        plain().keys_and_values(images())
