"""An OpenAI-compatible server on one llama.cpp context: `mixedkv serve`.

The engine (`engine`, `scheduler`, `sequences`, `sampling`, `detokenize`) needs nothing but numpy and
llama-cpp-python and can be used alone; the HTTP side (`app` and what it imports) needs `mixedkv[server]`.
"""
