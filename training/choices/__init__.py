"""What the configurations of methods share: the network, the loss, the start, the data that are drawn."""
