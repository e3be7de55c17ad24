"""Long work over a hospital's scans: cohorts, job records, leases. Shared by both halves; never imports torch."""
