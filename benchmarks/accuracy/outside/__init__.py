"""What the studies of a hospital from outside share: the sets, the ladder of scanners, halves of patients."""
