"""Segmentation federations: folder layout and inspection."""
