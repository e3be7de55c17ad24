"""The science in torch: networks, losses, metrics; pure functions over tensors."""
