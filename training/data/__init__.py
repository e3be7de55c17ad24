"""Read, check and split the hospitals' data, and make batches of it."""
