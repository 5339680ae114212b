"""An OpenAI-compatible server on one llama.cpp context: `mixedkv serve`, or `python -m mixedkv_server`.

This package is the HTTP side of `mixedkv.engine`, which generates the answers. It needs `mixedkv[server]`.
"""
