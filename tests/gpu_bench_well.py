"""A part for benchmarks/gpu.py --also that measures one number: see tests/benchmarks/test_gpu_bench.py."""

TITLE, ASKED, WEIGHT, FRESH, SIDE_BY_SIDE, XLA = "Well", "Nothing.", 2.0, False, False, ""
SHORT = ("one",)


def cases(config):
    return list(SHORT)


def run(case, config):
    yield {"value": 3, "ok": True}
