"""Serves artefacts: segments scans over HTTP."""
