"""The serving log and the usage of pool keys."""
