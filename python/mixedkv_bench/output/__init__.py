"""Output of a run: rows, tables, pictures."""
