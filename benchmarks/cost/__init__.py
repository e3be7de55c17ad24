"""Benchmarks of time and memory, each as a ratio to a named baseline."""
