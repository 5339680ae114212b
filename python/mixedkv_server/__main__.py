"""`python -m mixedkv_server` is `python -m mixedkv serve`."""

import runpy
import sys

sys.argv.insert(1, "serve")
runpy.run_module("mixedkv", run_name="__main__", alter_sys=True)
