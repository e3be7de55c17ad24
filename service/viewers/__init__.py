"""Viewers that send scans one after the other: their scans, and what they may choose."""
