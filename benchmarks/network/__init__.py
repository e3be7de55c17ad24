"""Federations over the network engine, with every member a process of its own on this machine."""
