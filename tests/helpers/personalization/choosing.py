"""An adaptation in which the choice of the epoch matters."""

from __future__ import annotations

from functools import cache

from personalization.iop_fl.network import route
from personalization.test_time.config import AdaptationConfig
from personalization.test_time.recipe import adapt
from tests.helpers.personalization.discs import UNGUARDED, discs, space

EPOCHS = 6


@cache
def with_a_choice() -> AdaptationConfig:
    """A configuration with a best epoch between the first and the last, on `discs(5, 7, contrast=1.2)`.

    At such rates the loss rises and falls; the exact course depends on the machine's rounding.
    """
    images, _ = discs(5, 7, contrast=1.2)
    for rate in (10.0, 30.0, 50.0, 20.0, 5.0, 100.0, 15.0, 40.0, 70.0):
        config = AdaptationConfig(epochs=EPOCHS, batch_size=3, shape_weight=0.0)
        config = config.model_copy(update={"bn_rate": rate})  # beyond what a client may ask
        if 0 < adapt(route(space()), images, config, limits=UNGUARDED).best_epoch < EPOCHS:
            return config
    raise AssertionError("the loss of every run fell, or rose, to its end")
