"""Federate hospitals over a network, on NVIDIA FLARE's certificates and connections (extra `network`).

NVFLARE provisions the certificates and carries bytes between processes over mutual TLS. Everything else is
Locum's: the plan, the groups, the policies, the checkpoints and the tensor files. `python -m
training.federate --engine network` is the operator's command, `python -m training.site` the hospital's.
"""
