"""Resolve a request to an artefact version and the network that serves it."""
