"""The command line."""

from mixedkv.cli.main import main

__all__ = ["main"]
