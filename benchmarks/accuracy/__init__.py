"""Experiments that measure accuracy: one folder each."""
