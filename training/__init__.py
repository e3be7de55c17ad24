"""Makes artefacts: federated algorithms, the engines that run them, and their data."""
