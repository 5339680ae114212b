"""Constraints on answers: schemas, grammars and tools, as masks over tokens."""
