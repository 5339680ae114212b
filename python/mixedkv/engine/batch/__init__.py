"""A step's tokens in llama.cpp's batch, and what comes out of it."""
