"""FedBiCross: one-shot federation by clusters."""
