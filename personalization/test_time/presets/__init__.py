"""The recipe of each preset, in a module of the preset's name as `RECIPE`.

A preset is a line in `personalization.options.presets` and a module here (docs/recipes/test-time-preset.md).
"""
