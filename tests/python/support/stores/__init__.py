"""Blocks, identities and sessions without a model."""
