"""FedBiCross against one-shot baselines and without its parts."""
