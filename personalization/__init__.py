"""Networks, losses, metrics and adaptation methods in torch: pure functions over tensors, without I/O."""
