"""Chat models of other frameworks that run in the caller's process, on an `Engine`. docs/frameworks.md tells
more.
"""
