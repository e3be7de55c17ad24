"""The engine runs a federated method: in worker processes on one machine, or at hospitals on a network."""
