"""An OpenAI-compatible server on one llama.cpp context: `mixedkv serve`, or `python -m mixedkv.server`.

What it answers with is `mixedkv.engine`; this package is the HTTP side and needs `mixedkv[server]`.
"""
