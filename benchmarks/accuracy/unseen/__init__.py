"""What Locum serves to a hospital that it has never seen."""
