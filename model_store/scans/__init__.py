"""Scans: what one is, and how the bytes of a file become one. Used through `model_store.scan`."""
