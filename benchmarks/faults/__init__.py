"""Fault injection: kill and disturb a running service and check its invariants."""
