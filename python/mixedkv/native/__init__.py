"""All that is close to llama.cpp: private parts of llama_cpp, batches, memory, arguments, where libraries
lie.
"""
