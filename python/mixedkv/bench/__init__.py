"""`mixedkv bench`: speed, memory, quality and recall of any cache setting, side by side in one run.

cli        the sub-command; options  what was asked for, checked before a model is loaded
settings   cache settings and flash attention; engine  a driver of llama_cpp's low-level API
filling    fills a cache to a depth from a short real prefix
speed, memory, quality, recall       one kind of row each; peers  the stock llama_cpp beside them
store, serve                         kept KV, and the server beside the stock one; store_*, serve_* are theirs
sample     text with known answers for the bundled model; models  a random-weight model for speed
result, schema, report, plots        the JSON object, its fields, the table, the pictures
"""
