"""Rows that come from a store or from other prompts, and go there."""
