"""What `make demo` shows: hospitals train together, and one from outside gets a model of its own."""
