"""Moves rows between an engine and a store, and from other prompts."""
