"""Chooses the next token and computes log probabilities."""
