"""Segmentation federations: folder layout, datasets and inspection."""
