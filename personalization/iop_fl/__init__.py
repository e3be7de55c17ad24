"""IOP-FL's outside personalization: one network, routed layer by layer over a federation's models."""
