"""Random sequences of operations on a context, compared with fresh evaluations after each step."""

import mixedkv  # noqa: F401  (before llama_cpp: it chooses the library)
