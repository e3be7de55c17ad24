"""The audit trail: a row per decision and per access to a patient's data, each with the digest before it."""
