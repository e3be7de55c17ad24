"""Store trained models as immutable artefacts, decode scans, and preprocess them. NumPy only, no torch."""
