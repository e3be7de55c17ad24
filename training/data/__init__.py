"""Read, check and split the hospitals' files."""
