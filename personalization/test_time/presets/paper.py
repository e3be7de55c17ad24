"""Preset `paper`: C + 0.01 (S + E), mean reductions, noise only (IOP-FL, Eq. 10)."""

from personalization.test_time.objective import LossWeights, WeightedSum
from personalization.test_time.recipe import Routing

RECIPE = Routing(WeightedSum(LossWeights(consistency=1.0, shape=0.01, entropy=0.01)))
