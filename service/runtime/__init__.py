"""Processes and monitoring: broker, queue, logs, metrics, readiness."""
