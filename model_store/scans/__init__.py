"""The scan type, the formats and their readers. Callers use `model_store.scan`."""
