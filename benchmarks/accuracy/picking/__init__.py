"""Choosing a cluster for a held-out site without labels."""
