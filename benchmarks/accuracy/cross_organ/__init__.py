"""FedOAP over organs, against its rivals and without its parts."""
