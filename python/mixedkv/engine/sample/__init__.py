"""Chooses the next token, and tells the probabilities of the others."""
