"""Bounded reception of request bodies and multipart uploads."""
