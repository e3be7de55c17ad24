"""One scan with the dose by shift: the graph that answers at once, against its parts."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch

from personalization.iop_fl.batch_norm import profile
from personalization.iop_fl.spread import Spread, sent_by
from personalization.test_time.ladder import ScanByShift, blended, dose_by_shift
from personalization.test_time.presets.ladder import shift_graph
from tests.helpers.personalization.discs import discs, space


@pytest.fixture(scope="module")
def spread() -> Spread:
    network, patients = space().plain(), [index // 4 for index in range(24)]
    found = [profile(network, discs(24, 3, contrast=each)[0], patients) for each in (2.0, 2.2)]
    sent = [sent_by(each, None) for each in found]
    mean = {name: torch.stack([each[name] for each in sent]).mean(dim=0) for name in sent[0]}
    return Spread.of(found[0].layers, mean, 2)


@pytest.mark.parametrize("gain", [1.0, 2.0, 6.0], ids=["natural", "shifted", "very far"])
def test_the_graph_answers_as_the_ladder_with_the_dose_of_the_scan(spread: Spread, gain: float) -> None:
    """The same weights, any number of slices; the graph has to find the dose by itself."""
    network = space().plain().eval()
    graph = onnxruntime.InferenceSession(shift_graph(network, spread, 1, (32, 32)))
    for count in (1, 5):
        scan = gain * discs(count, 9)[0]
        few = scan[::2]
        dose = dose_by_shift(profile(network, few, [0] * len(few)), spread)
        moved = blended(space().plain(), scan, dose.doses)
        with torch.no_grad():
            expected = torch.softmax(moved(scan), dim=1)
        (found,) = graph.run(None, {"image": scan.numpy()})
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=2e-5)
    assert (dose.share > 0) == (gain > 1)
    assert (dose.doses[2] > 0) == (gain > 2)


def test_the_graph_takes_a_pass_and_a_half(spread: Spread) -> None:
    """A plain answer is one pass; what is measured takes the rest of the 2.2 that a scan may take."""
    answers, seen = ScanByShift(space().plain(), spread), []
    for convolution in answers.network.modules():
        if isinstance(convolution, torch.nn.Conv2d):
            convolution.register_forward_hook(lambda _module, inputs, _output: seen.append(len(inputs[0])))
    with torch.no_grad():
        answers(discs(4, 1)[0])
    convolutions = sum(isinstance(module, torch.nn.Conv2d) for module in space().plain().modules())
    assert sum(seen) == (2 + 4) * convolutions
