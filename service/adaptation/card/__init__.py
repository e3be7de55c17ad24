"""The card of an adaptation: one HTML page that says what was learned, from what, and what the gate found."""
