"""A part for benchmarks/gpu.py --also whose cases go wrong in every way: see tests/benchmarks/test_gpu_bench.py."""

import os
import time

TITLE, ASKED, WEIGHT, FRESH, SIDE_BY_SIDE, XLA = "Broken", "Nothing.", 3.0, False, False, ""
SHORT = ("raises", "dies", "well", "hangs", "never")


def cases(config):
    return list(SHORT)


def run(case, config):
    if case == "raises":
        yield {"value": 1}
        raise ValueError("on purpose")
    if case == "dies":
        print("dying", flush=True)
        os._exit(7)
    if case == "hangs":
        time.sleep(600)
    yield {"value": 2}
