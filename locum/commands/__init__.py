"""The `locum` command: `main` is its entry point."""

from locum.commands.app import main

__all__ = ["main"]
