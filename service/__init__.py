"""Serves artefacts: segments scans over HTTP."""

# Before pydicom, which some modules import first.
import model_store  # noqa: F401
