"""Simulated years of a watch: false alarms, delays and silence."""
