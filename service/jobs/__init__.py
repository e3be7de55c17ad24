"""Long work over a hospital's scans: cohorts, job records, leases. For both halves, without torch."""
