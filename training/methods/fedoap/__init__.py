"""FedOAP: one network for tumours of any organ."""
