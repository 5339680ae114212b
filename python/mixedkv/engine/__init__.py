"""Continuous batching on one context, without HTTP."""
