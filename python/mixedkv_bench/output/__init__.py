"""What a run leaves: rows, tables, pictures."""
