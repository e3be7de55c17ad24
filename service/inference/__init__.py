"""Inference: a bounded number of scans at a time, through a bounded cache of loaded networks."""
