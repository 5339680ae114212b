"""The live KV cache of a `Llama`, and blocks of rows exported from it."""
