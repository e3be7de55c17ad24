"""Jobs: records, states, leases, files and expiry. Used by API and worker, without torch."""
