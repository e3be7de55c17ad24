"""FedIns against federated baselines."""
