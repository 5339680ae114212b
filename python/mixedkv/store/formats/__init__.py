"""Encodes and decodes the file formats of blocks."""
