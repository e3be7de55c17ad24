"""Outside personalization of IOP-FL: a network with layers mixed (routed) from a federation's models."""
