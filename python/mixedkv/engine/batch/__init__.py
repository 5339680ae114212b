"""Puts a step's tokens into llama.cpp's batch and takes the results out."""
