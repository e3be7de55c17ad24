"""FedOAP: losses, personal parts, and joining a federation with a few masks."""
