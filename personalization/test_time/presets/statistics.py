"""Preset `statistics`: nothing is learned. The record of step 0 has the loss of `paper`."""

from personalization.test_time.presets import paper

RECIPE = paper.RECIPE
