"""What `make demo` shows: a phantom federation trains, and the service segments scans it has never seen."""
