"""What all benchmarks share: cells, rows, tables, scores and measurement."""
