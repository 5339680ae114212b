"""Tiers that the entries of a store lie in."""
