"""Turns messages into prompts: templates and tokens."""
