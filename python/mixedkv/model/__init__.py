"""A GGUF file before anything native opens it: its header, what a cache of it would take, its identity."""
