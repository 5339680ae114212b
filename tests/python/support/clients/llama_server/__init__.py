"""llama.cpp's own tests of llama-server, run against `mixedkv serve`."""
