from __future__ import annotations

import numpy as np
import pytest
import torch

from personalization.errors import StateError
from personalization.state import (
    State,
    StreamingMean,
    check_compatible,
    check_finite,
    clone,
    ema,
    from_safetensors,
    to_safetensors,
)


def _state(seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(4, 3, generator=generator),
        "half": torch.randn(2, 2, generator=generator).to(torch.bfloat16),
        "batches": torch.tensor(seed),
        "mask": torch.tensor([True, seed % 2 == 0]),
    }


def test_clone_shares_nothing_and_keeps_no_gradient() -> None:
    source = {"w": torch.ones(2, requires_grad=True)}
    copied = clone(source)
    with torch.no_grad():
        source["w"].zero_()
    assert copied["w"].tolist() == [1, 1]
    assert not copied["w"].requires_grad


def test_streaming_mean_equals_a_naive_loop() -> None:
    states, weights = [_state(i) for i in (3, 4, 5)], [10.0, 1.0, 7.0]
    mean = StreamingMean()
    for state, weight in zip(states, weights, strict=True):
        mean.add(state, weight)
    assert (mean.count, mean.weight) == (3, 18.0)
    result = mean.result()
    for name in ("weight", "half"):
        arrays = [s[name].to(torch.float64).numpy() for s in states]
        naive = sum(w * a for w, a in zip(weights, arrays, strict=True)) / 18
        expected = torch.from_numpy(np.asarray(naive)).to(states[0][name].dtype)
        assert torch.equal(result[name], expected)
    assert int(result["batches"]) == 3
    assert torch.equal(result["mask"], states[0]["mask"])


def test_streaming_mean_of_equal_states_is_exact() -> None:
    state = _state(7)
    for times in (1, 3):
        mean = StreamingMean()
        for _ in range(times):
            mean.add(state, 0.1)
        result = mean.result()
        assert all(torch.equal(result[name], state[name]) for name in state)


def test_streaming_mean_of_float32_keeps_small_weights() -> None:
    # One site of weight 1e8 at 0 and 1000 sites of weight 1 at 1e8: a float32 sum would stall.
    mean = StreamingMean()
    mean.add({"w": torch.zeros(1)}, 1e8)
    for _ in range(1000):
        mean.add({"w": torch.tensor([1e8])}, 1)
    assert float(mean.result()["w"]) == pytest.approx(1000 * 1e8 / (1e8 + 1000), rel=1e-7)


def test_streaming_mean_is_unchanged_by_source_edits_and_rejected_states() -> None:
    state = _state(1)
    mean = StreamingMean()
    mean.add(state, 2)
    expected = mean.result()
    bad = clone(state)
    bad["half"][0, 0] = float("nan")
    for wrong, message in (
        ({"weight": state["weight"]}, "missing"),
        (bad, "site CS: tensor 'half' has 1 of 4 values that are not finite"),
    ):
        with pytest.raises(StateError, match=message):
            mean.add(wrong, 1, "site CS")
    for tensor in state.values():
        tensor.zero_()
    for name, tensor in mean.result().items():
        assert torch.equal(tensor, expected[name])
    assert mean.weight == 2


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_streaming_mean_rejects_a_weight_that_is_not_positive(weight: float) -> None:
    with pytest.raises(StateError, match="expected a positive weight"):
        StreamingMean().add(_state(0), weight)


def test_streaming_mean_of_no_states_is_rejected() -> None:
    with pytest.raises(StateError, match="at least one site"):
        StreamingMean().result()


def test_ema_matches_hand_computed_values_converges_and_copies() -> None:
    previous = {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(3)}
    current = {"w": torch.tensor([11.0, 2.0]), "n": torch.tensor(4)}
    mixed = ema(previous, current, tau=0.9)
    assert mixed["w"].tolist() == pytest.approx([0.1 * 1 + 0.9 * 11, 2.0])
    assert int(mixed["n"]) == 4
    assert mixed["n"].data_ptr() != current["n"].data_ptr()
    assert previous["w"].tolist() == [1.0, 2.0]
    # With a constant target P converges to it; Eq. 4 as printed would converge to zero.
    for _ in range(40):
        mixed = ema(mixed, current, tau=0.9)
    assert torch.equal(mixed["w"], current["w"])


@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_ema_with_tau_0_or_1_equals_one_of_the_states(tau: float) -> None:
    previous, current = _state(1), _state(2)
    chosen = current if tau else previous
    mixed = ema(previous, current, tau)
    assert torch.equal(mixed["weight"], chosen["weight"])
    assert torch.equal(mixed["half"], chosen["half"])


def test_ema_rejects_tau_outside_the_unit_interval() -> None:
    with pytest.raises(StateError, match="tau"):
        ema(_state(0), _state(1), 1.1)


def test_check_compatible_rejects_a_mismatch_by_tensor_name() -> None:
    first = _state(0)
    check_compatible([first, _state(1)])
    with pytest.raises(StateError, match=r"state 3: tensor 'weight': expected \[4, 3\].*found \[3, 4\]"):
        check_compatible([first, _state(1), {**first, "weight": first["weight"].T}])
    with pytest.raises(StateError, match=r"tensor 'weight'.*found \[4, 3\] torch\.float64"):
        check_compatible([first, {**first, "weight": first["weight"].double()}])
    with pytest.raises(StateError, match=r"missing none, unexpected \['extra'\]"):
        check_compatible([first, {**first, "extra": torch.ones(1)}])


def test_check_finite_names_the_tensor() -> None:
    check_finite(_state(0))
    with pytest.raises(StateError, match="tensor 'b' has 1 of 2"):
        check_finite({"a": torch.ones(1), "b": torch.tensor([1.0, float("inf")])})


def test_safetensors_bytes_are_deterministic_and_round_trip() -> None:
    state = _state(9)
    shared = torch.arange(12.0).reshape(3, 4)
    state |= {"view": shared.T, "other_view": shared[1]}
    data = to_safetensors(state)
    assert data == to_safetensors(dict(reversed(list(clone(state).items()))))
    back = from_safetensors(data)
    check_compatible([state, back])
    assert all(torch.equal(back[name], state[name]) for name in state)


@pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda d: b"", lambda d: b"\x80\x04K\x01."])
def test_from_safetensors_rejects_damaged_bytes(damage: object) -> None:
    with pytest.raises(StateError, match="not a safetensors file"):
        from_safetensors(damage(to_safetensors(_state(0))))  # type: ignore[operator]
