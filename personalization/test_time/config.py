"""One adaptation, completely specified: the options of a client, and what follows from them."""

from __future__ import annotations

from typing import Any, ClassVar

from personalization.iop_fl.routers import ROUTING_RATES
from personalization.options.adaptation import RoutingOptions
from personalization.options.checked import Checked
from personalization.options.presets import PRESETS, Learned, Preset, PresetName
from personalization.test_time.ladder import DOSES, Doses


class AdaptationConfig(Checked, RoutingOptions):
    """The fields of RoutingOptions. Raises AdaptationError naming the field that does not fit.

    `router` says which coefficients the network was built with (`route`): `adapt` rejects another.
    """

    WHAT: ClassVar[str] = "adaptation"

    # One recipe: what `auto` stands for is decided before, and a scan's are among them.
    preset: PresetName = "paper"

    @property
    def of_preset(self) -> Preset:
        """What the preset's name stands for."""
        return PRESETS[self.preset]

    @property
    def learns(self) -> frozenset[Learned]:
        """What the preset learns, without `bn` if `train_bn_affine` is false."""
        return self.of_preset.learns - (frozenset() if self.train_bn_affine else {"bn"})

    @property
    def passes(self) -> int:
        """Over the images, to learn from them: `epochs`, or 0 where nothing is learned."""
        return self.epochs if self.learns else 0

    @property
    def rate(self) -> float:
        """The coefficients' learning rate, the router's default where none is given."""
        return ROUTING_RATES[self.router] if self.routing_rate is None else self.routing_rate

    @property
    def ladder(self) -> Doses:
        """The doses of the ladder, the default where none are given."""
        return DOSES if self.doses is None else self.doses

    def facts(self) -> dict[str, Any]:
        """Every field, as JSON has it: what a checkpoint is compared with."""
        return self.model_dump(mode="json") | {"routing_rate": self.rate}
