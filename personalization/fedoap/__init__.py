"""FedOAP: losses, personal parts, and joining with masks."""
