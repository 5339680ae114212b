"""Servers that tests start: ours, stores that servers share, halves of a split model."""
