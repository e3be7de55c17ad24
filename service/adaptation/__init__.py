"""The worker's half of a job: adapt to scans, merge, judge, publish. All of the service that has torch."""
