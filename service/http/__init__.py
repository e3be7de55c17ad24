"""The HTTP border: problems, validation, parameters, conditional requests."""
