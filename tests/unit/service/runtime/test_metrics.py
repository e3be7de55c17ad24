"""Which samples an exposition holds."""

from __future__ import annotations

from service.runtime.metrics import Metrics


def test_exposition_leaves_out_hidden_samples() -> None:
    metrics = Metrics()
    metrics.watch_drift(lambda: {("north", "pool@1"): 0.25, ("south", "pool@1"): 0.5})
    metrics.ready.labels("store").set(1)
    whole = metrics.exposition()[0].decode().splitlines()
    assert 'locum_key_usage_drift{hospital="south",model="pool@1"} 0.5' in whole

    assert metrics.exposition(lambda _: True) == metrics.exposition()
    shown = metrics.exposition(lambda labels: labels.get("hospital") != "south")[0].decode().splitlines()
    assert shown == [line for line in whole if "south" not in line]
