"""FedOAP over organs, against its baselines."""
