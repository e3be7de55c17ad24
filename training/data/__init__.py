"""The hospitals' data: folders, checks, splits, slices and batches."""
