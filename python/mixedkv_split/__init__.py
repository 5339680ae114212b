"""Split inference: embeddings and the output head on one machine, the layers and the cache on another."""
