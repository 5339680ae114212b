"""Drafts tokens: by a draft model, prediction layers, or repeated text."""
