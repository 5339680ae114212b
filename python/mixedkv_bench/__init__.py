"""`mixedkv bench`: speed, memory, quality and recall of any cache setting, side by side in one run.

memory, speed, quality, recall, store, serve, ...    one test each: its rows, how it measures, its table
bench_test   what a test is made of; catalog  all tests, and the object their rows make
options      what was asked for; arguments  reads and checks it before a model is loaded; run  does it
harness      what the tests measure with; nothing in it knows a test
output       the JSON file, the tables, the pictures, docs/bench-schema.md
"""

import sys

if "llama_cpp" not in sys.modules:  # the process of `stock_peer` has it already, on the library it came with
    import mixedkv  # noqa: F401  before any module here imports llama_cpp: it is to run on this package's library
