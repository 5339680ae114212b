"""`mixedkv bench`: speed, memory, quality and recall of any cache setting, side by side in one run.

memory, speed, quality, recall, kept_kv, serving    one test each: its rows, how it measures, its table
bench_test   what a test is made of; catalog  all tests, and the object their rows make
options      what was asked for; arguments  reads and checks it before a model is loaded; run  does it
harness      what the tests measure with; nothing in it knows a test
output       the JSON file, the tables, the pictures, docs/bench-schema.md
"""
