"""Federated methods. Every module of this package is imported by `registry`, which finds the methods by name.

A method is one file, or one folder where it needs more.
"""
