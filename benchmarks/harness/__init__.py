"""Shared by all benchmarks: experiments, cells, rows, tables, scores, measurement."""
