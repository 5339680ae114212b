"""The live KV cache of a `Llama`, and rows taken out of it."""
