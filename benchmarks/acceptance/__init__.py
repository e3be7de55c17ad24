"""Whether the bounds of an acceptance hold: coverage over draws from recorded patients."""
