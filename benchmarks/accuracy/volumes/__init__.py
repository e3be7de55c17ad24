"""Slices or volumes: Dice and surface distances of federations on whole MRI volumes."""
