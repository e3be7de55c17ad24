"""Test-time adaptation at a held-out site."""
