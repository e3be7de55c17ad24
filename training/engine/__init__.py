"""Engines run a federated method. The in-process engine runs it in worker processes on one machine."""
