"""Turns tokens into text: bytes, thoughts, and the parts of an answer."""
