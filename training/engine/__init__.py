"""Engines: what runs a federated method. Here, processes on one machine."""
