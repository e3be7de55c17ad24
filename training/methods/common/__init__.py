"""Training code that several federated methods share."""
