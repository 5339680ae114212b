"""Prompts as tokens: long texts, what is dropped of them, where messages start, what they repeat."""
