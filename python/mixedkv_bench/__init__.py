"""`mixedkv bench`: speed and quality of any cache setting, side by side in one run.

quick, speed, quality, tasks, reuse, sensitivity    its rows, how it measures, its table
bench_test   what a test is made of; catalog  all tests and their rows
arguments    reads and checks what was asked for before a model is loaded; run  does it
harness      what the tests measure with; nothing in it knows a test
output       lines of JSON, tables

Other figures of the pages come from scripts in tests/measure.
"""
