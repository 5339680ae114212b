"""Tokens guessed ahead: draft models, prediction heads, repeated text."""
