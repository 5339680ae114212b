"""Finds what a prompt starts from: the rows of a context, who may share them; also without an engine."""
