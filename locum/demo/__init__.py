"""What `locum demo` and `make demo` show: a model fitted to a scan from outside, and how one is trained."""
