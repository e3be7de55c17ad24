"""Networks of MONAI by an allow-list, checked before MONAI sees their arguments."""
