"""Cohorts: uploaded scans and masks, their validation and their patients."""
