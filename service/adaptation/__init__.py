"""Requests for adaptations, and the card of a job."""
