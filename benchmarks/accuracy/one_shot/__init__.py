"""FedBiCross against one-shot baselines."""
