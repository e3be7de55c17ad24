"""FedIns: a federated pool of scale-and-shift parameters."""
