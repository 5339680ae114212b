"""How blocks lie in files."""
