"""Measurements of Locum: accuracy tables that resume, and costs as ratios within one run."""
