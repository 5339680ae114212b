"""File formats of blocks."""
