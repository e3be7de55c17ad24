"""Plan a federation of volumes from aggregates that its sites send: geometry, network, normalisation."""
