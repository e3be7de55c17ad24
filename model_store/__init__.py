"""What a trained thing is on disk, and how a scan becomes its input."""
