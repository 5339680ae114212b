"""Constraints on answers (schemas, grammars, tools), as masks over tokens."""
