"""Decides which jobs and sequences are in the next step, without a model."""
