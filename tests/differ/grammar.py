"""What a case may be, and `draw`: a case from a seed and an index.

A feature of jzero joins here: its options are drawn by `draw_config` (or become an event), `features` names them for
the table of coverage, and `SHARES` says how often a nightly run must have drawn them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import Any

from differ.blocks import BLOCKS, FLAX, STATEFUL, TILED
from differ.chains import AMPLIFY, HYPERPARAMS, OPTIMIZERS, RARE, SIGNS, SMOOTH, WRAPS

STACKED = ("scan", "scan_remat", "nested", "Scan")
FLAVOURS = ("linen", "nnx", "plain")
WIDTHS = (8, 8, 16, 24, 7, 12, 13)
HEADS = ("mse", "own", "tied", "mse", "bare")
DTYPES = ("float32",) * 5 + ("bfloat16",) * 4 + ("float16",)
MESHES = ("flat",) * 5 + ("hpz", "two", "hsdp", "tp", "explicit")
TIERS = {
    "device": {},
    "stream": {"tier": "host"},
    "host": {"update": "host"},
    "late": {"update": "host", "delay": 1},
    "disk": {"tier": "disk"},
    "late disk": {"tier": "disk", "delay": 1},
    "params": {"params": "host"},
    "params and update": {"params": "host", "update": "host"},
    "params and disk": {"params": "host", "tier": "disk"},
}
OUTSIDE = ("host", "late", "disk", "late disk", "params and update", "params and disk")
EVENTS = ("jit", "donated jit", "restore", "reshard", "replace", "skip", "pickle", "second", "evaluate")
STEPS = ("jit", "jzero.jit")
NAMES = ("params", "states", "opt_state", "mu", "count", "inner", "master", "moment_scales", "rounding_count", "step")
"""Names of layers that trees of params, states and checkpoints have too."""
TRAINABLE = {"linen": ("filter", "part"), "nnx": ("filter", "wrt"), "plain": ("filter", "part")}
"""How a case says that some params are frozen: `trainable=`; an optimizer state over the others (of a plain pytree, and
an update of these alone); `wrt=` of an NNX optimizer."""


def draw(seed: int, index: int) -> dict[str, Any]:
    """A case, as plain data; a pure function of its arguments."""
    rng = random.Random(f"{seed}/{index}")
    flavour = rng.choice(FLAVOURS)
    head = rng.choice([h for h in HEADS if h != "bare" or flavour == "plain"])
    case: dict[str, Any] = {
        "id": f"{seed}/{index}", "flavour": flavour, "head": head, "width": rng.choice(WIDTHS),
        "blocks": draw_blocks(rng, flavour, head), "dtype": rng.choice(DTYPES), "compute": None,
        "data": rng.randrange(2**31), "steps": rng.randint(5, 7),
    }  # fmt: skip
    if case["dtype"] == "float32" and rng.random() < 0.2:
        case["compute"] = "bfloat16"
    case |= draw_chain(rng)
    case |= draw_place(rng, case["dtype"], flavour, head)
    # where a moment is rounded, the sign of an update is another; with a trust ratio rounding grows threefold a step
    if case["optimizer"] in SIGNS or "trust_ratio" in case["wraps"]:
        for name in ("moment_dtype", "master_dtype"):
            case["config"].pop(name, None)
    if case["optimizer"] in SIGNS:  # of a gradient of one value only rounding is left
        case["wraps"] = [x for x in case["wraps"] if x != "centralize"]
    stateless = not set(case["blocks"]) & set(STATEFUL)
    if (flavour == "nnx" or stateless) and rng.random() < (0.2 if stateless else 0.5):
        case["micro"] = {"accumulate": rng.choice((1, 2, 3)), "reduce": draw_reduce(rng, case)}
    case |= {
        "step": "eager" if can_be_eager(case) and rng.random() < 0.08 else rng.choice(STEPS),
        "donate": rng.random() < 0.5, "born": rng.random() < 0.5, "gather": rng.random() < 0.7,
    }  # fmt: skip
    case["events"] = draw_events(rng, case)
    if case["mesh"]["kind"] == "explicit" and "custom" in case["blocks"]:
        case["gather"] = True  # its backward pass contracts split dims, which jax refuses on Explicit axes
    if case["mesh"]["kind"] == "explicit" and flavour == "nnx" and "GRU" in case["blocks"]:
        case["gather"] = True  # the first carry of nnx.RNN is not split, which the scan refuses on Explicit axes
    configs = configs_of(case)
    # a trust ratio takes steps as long as the params are: a GRU then amplifies rounding tenfold from step to step
    smooth = case["optimizer"] in SMOOTH and not {"apply_every", "trust_ratio"}.intersection(case["wraps"])
    exact = case["dtype"] == "float32" and not case["compute"] and not any(map(low_precision, configs))
    case["fed"] = not (smooth and exact and rng.random() < 0.7)
    if not exact:  # a gradient cancels against the decay of its param, or against its mean, down to rounding in 16 bits
        lost = "decay" if case["optimizer"] in SIGNS else "" if case["optimizer"] in SMOOTH else "centralize"
        case["wraps"] = [x for x in case["wraps"] if x != lost]
    parts = [batch_parts(case["mesh"]), *(e["mesh"]["n"] for e in case["events"].values() if "mesh" in e)]
    micro = (case.get("micro") or {"accumulate": 1})["accumulate"]
    case["rows"] = math.lcm(*parts) * micro * (2 if max(parts) < 5 else 1)
    # the last draws: cases without them are what they were
    if head != "bare" and rng.random() < 0.25:
        case["trainable"] = rng.choice(TRAINABLE[flavour])
    if flavour == "nnx" and can_be_split(case) and rng.random() < 0.5:
        case["mesh"] |= {"kind": "tp", "logical": rng.random() < 0.5, "apart": rng.random() < 0.5}
    if case["step"] == "jzero.jit" and flavour != "plain" and rng.random() < 0.5:
        case["plan"] = "found"
    if head != "bare" and rng.random() < 0.2:
        case["scan_axes"] = rng.choice(("named", "none"))
    if case["mesh"]["kind"] == "tp" and case["mesh"]["n"] == 8 and rng.random() < 0.6:
        levels = ("two", "hsdp", "hpz") if case["config"]["stage"] == 3 else ("two", "hsdp")
        case["mesh"] |= {"levels": rng.choice(levels), "apart": False}
    if case["step"] == "jzero.jit" and case["config"]["tier"] in ("device", "stream") and rng.random() < 0.4:
        case["reference"] = True
    if case.get("micro") and case["dtype"] != "float16" and rng.random() < 0.5:  # whose gradients would overflow
        case["sum"] = True
    if flavour != "plain" and rng.random() < 0.2:
        case["begins"] = 3
    free = [at for at in range(1, case["steps"]) if str(at) not in case["events"]]
    if flavour != "plain" and free and rng.random() < 0.35:
        draw_files(rng, case, rng.choice(free))
    if rng.random() < 0.2:
        draw_int8(rng, case)
    stateful = set(case["blocks"]) & set(STATEFUL)
    if flavour == "linen" and stateful == {"Dropout"} and rng.random() < 0.3:  # whose loss closes over its key: refused
        case["micro"] = {"accumulate": 2, "reduce": "microbatch"}
        case["rows"] *= 2
    configs = configs_of(case)
    outside = any(c["tier"] in OUTSIDE for c in configs)
    if outside and case["optimizer"] not in SIGNS and case["fed"] and rng.random() < 0.15:
        case["wraps"] = [*case["wraps"], "last_gradient"]
    if rng.random() < 0.25:
        draw_codes(rng, case)
    if rng.random() < 0.12:
        draw_gradient_codes(rng, case)
    on_device = case["config"]["tier"] in ("device", "stream") and case["mesh"]["kind"] != "explicit"
    if flavour != "plain" and on_device and rng.random() < 0.2:
        case["inside"] = True
    codes = case["config"].get("gather_dtype")
    if codes and {case["mesh"]["kind"], case["mesh"].get("levels")} & {"two", "hpz", "hsdp"} and rng.random() < 0.5:
        case["config"]["gather_dtype"] = {"gpu": codes}  # a hop of its own
    if case["optimizer"].startswith(("schedule_free", "madgrad")):  # the update is a difference of params: it rounds
        case["wraps"] = [x for x in case["wraps"] if x != "trust_ratio"]
    free = [at for at in range(1, case["steps"]) if str(at) not in case["events"]]
    if free and not stateful and rng.random() < 0.03:
        case["wraps"] = [*(x for x in case["wraps"] if x != "apply_if_finite"), "apply_if_finite"]
        case["events"] = dict(sorted({**case["events"], str(free.pop()): {"kind": "skip"}}.items()))
    if free and rng.random() < 0.4:
        at = rng.choice(free)
        if tier_at(case, at) in ("disk", "params and disk"):
            full = {"kind": "full disk", "writes": rng.choice((0, 1, 4))}
            case["events"] = dict(sorted({**case["events"], str(at): full}.items()))
    exact = not any("moment_dtype" in c for c in configs_of(case))
    if exact and case["fed"] and case["optimizer"] not in (*SIGNS, *AMPLIFY) and rng.random() < 0.15:
        # a list over all params is not cut to those that are trained: refused
        unusual = [name for name in RARE if name != "few_values" or case.get("trainable") != "filter"]
        case["wraps"] = [rng.choice(unusual), *case["wraps"]]
    if rng.random() < (0.5 if case["mesh"]["kind"] == "explicit" else 0.05):
        case["closes"] = True
    if case.get("micro") and rng.random() < 0.4:
        case["aux"] = True
    if case.get("micro") and not case.get("sum") and rng.random() < 0.4:
        case["weighed"] = True
    if case["blocks"] and rng.random() < 0.1:
        case["names"] = rng.sample(NAMES, len(case["blocks"]))
    if case["dtype"] == "bfloat16" and rng.random() < 0.4:
        draw_update_codes(rng, case)
    if head in ("own", "tied") and rng.random() < 0.5:
        draw_tiles(rng, case)
    if {*case["blocks"]} & {*TILED, "Dense", "LayerNorm"} and rng.random() < 0.15:
        case["tiled"] = True
    if any(config["stage"] == 3 for config in configs_of(case)) and rng.random() < 0.15:
        case["pieces"] = rng.choice((200, 500))
        if case["step"].startswith("eager"):  # where each piece of a `jax.shard_map` is compiled again
            del case["pieces"]
    for config in configs_of(case):
        fetches = config["stage"] < 3 or config["tier"].startswith("params")
        if not fetches and "reshard_after_forward" not in config and rng.random() < 0.25:
            config["kept_gathered_bytes"] = rng.choice((100, 700, 3000, 20000))
    return case


def configs_of(case: dict) -> list[dict]:
    """All configs of a case: the first, and those of its events."""
    return [case["config"], *(e["config"] for e in case["events"].values() if "config" in e)]


def tier_at(case: dict, at: int) -> str:
    """Where the state is before a step."""
    moves = (e for i, e in case["events"].items() if e["kind"] in ("restore", "reshard") and int(i) < at)
    moved = [e["config"]["tier"] for e in moves]
    return [case["config"]["tier"], *moved][-1]


def draw_int8(rng, case: dict) -> None:
    """Moments in 8 bits, where all places of a case may have them."""
    configs = configs_of(case)
    rounded = case["optimizer"] in SIGNS or "trust_ratio" in case["wraps"]
    if not rounded and not any(c["tier"] in OUTSIDE for c in configs):
        size = rng.choice((8, 16, 32))
        for config in configs:
            config |= {"moment_dtype": "int8", "quantize_block": size}


def draw_codes(rng, case: dict) -> None:
    """Weights that are gathered in 8 bits, in the places that gather them.

    Of a stack whose layout cuts the scanned dim XLA gathers all layers as they are: the dims are named, and there is no
    loop in a loop. A slice that cuts a block travels as it is: there is none ("indexed" takes three columns).
    """
    if {"nested", "indexed"}.intersection(case["blocks"]):
        return
    if stacks_of(case):
        case["scan_axes"] = "named"
    size = case["config"].get("quantize_block") or rng.choice((8, 8, 16))
    case["width"] = rng.choice((16, 24))  # of others most layouts would cut blocks
    if "sliced" in case["blocks"]:  # in two halves of the width
        case["width"] = 16
    for config in configs_of(case):
        if config["stage"] == 3:
            config |= {"gather_dtype": rng.choice(("int8", "float8_e4m3fn")), "quantize_block": size}


def draw_gradient_codes(rng, case: dict) -> None:
    """Gradients that travel in 8 or 4 bits; the plain run takes them as they come."""
    size, case["fed"], codes = rng.choice((8, 16)), True, rng.choice(("int8", "int4"))
    for config in configs_of(case):
        if config["stage"] >= 2:
            config |= {"reduce_dtype": codes, "quantize_block": config.get("quantize_block") or size}


def draw_update_codes(rng, case: dict) -> None:
    """Updates that travel in 8 bits, in the places that gather new params; the plain run takes these as they come."""
    case["width"] = 16 if "sliced" in case["blocks"] else rng.choice((16, 24))  # others would cut blocks
    within_hosts = "hpz" in (case["mesh"]["kind"], case["mesh"].get("levels"))
    for config in configs_of(case):
        gathers = config["stage"] in (1, 2) or (config["stage"] == 3 and config is case["config"] and within_hosts)
        plain = "updates" not in config and config.get("master_dtype", "auto") == "auto"
        if gathers and plain and config["tier"] in ("device", "stream"):
            config |= {"update_dtype": "int8", "quantize_block": config.get("quantize_block") or 8}


def draw_tiles(rng, case: dict) -> None:
    """A loss in tiles of tokens; a linen module computes it itself, others in a loss that is wrapped."""
    case["tiles"] = {
        "tiles": rng.choice((None, 1, 2, 3, 5)), "reduction": rng.choice(("mean", "mean", "none")),
        "recompute": rng.choice((None, None, True)), "label_smoothing": rng.choice((0.0, 0.0, 0.1)),
        "z_loss": rng.choice((0.0, 0.0, 0.01)), "soft_cap": rng.choice((None, None, 3.0)),
    }  # fmt: skip
    if case["flavour"] != "linen":
        case["gather"] = True


def draw_blocks(rng, flavour: str, head: str) -> list[str]:
    """One to four layers."""
    if head == "bare":
        return []
    known = list(BLOCKS) + ([] if flavour == "plain" else [*FLAX, *FLAX])
    return [rng.choice(known) for _ in range(rng.randint(1, 4))]


def draw_chain(rng) -> dict[str, Any]:
    """An optimizer and what goes round it."""
    inject = rng.random() < 0.12
    base = rng.choice(list(HYPERPARAMS if inject else OPTIMIZERS))
    wraps = rng.sample(list(WRAPS), rng.choice((0, 0, 0, 1, 1, 2)))
    if "multi_steps" in wraps:  # it counts steps of what lies inside, and must be outermost to skip work
        wraps = [*(w for w in wraps if w != "multi_steps"), "multi_steps"]
    return {"optimizer": base, "inject": inject, "wraps": wraps}


def draw_place(rng, dtype: str, flavour: str, head: str) -> dict[str, Any]:
    """The mesh and the config."""
    kind = rng.choice([m for m in MESHES if m != "tp" or (flavour == "plain" and head != "bare")])
    if kind in ("hpz", "two", "hsdp", "tp"):
        n = rng.choice((4, 6, 8))
    else:
        n = rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 8, 4))
    tier = "device" if kind == "explicit" or rng.random() < 0.3 else rng.choice(list(TIERS))
    low = {"params": 3, "params and update": 3, "params and disk": 3}.get(tier, 2 if tier in OUTSIDE else 0)
    stage = 3 if kind == "hpz" else max(low, rng.choice((0, 1, 2, 2, 3, 3, 3)))
    mesh = {"kind": kind, "n": n} | ({"logical": rng.random() < 0.5} if kind == "tp" else {})
    return {"mesh": mesh, "config": draw_config(rng, dtype, stage, tier, kind)}


def draw_config(rng, dtype: str, stage: int, tier: str, kind: str = "flat") -> dict[str, Any]:
    """Fields of `ZeroConfig`, and "tier", a key of `TIERS`."""
    config: dict[str, Any] = {"stage": stage, "tier": tier, "min_shard_bytes": rng.choice((0, 0, 0, 0, 200, "auto"))}

    def maybe(name, chance, *values):
        if rng.random() < chance:
            config[name] = rng.choice(values)

    outside = tier in OUTSIDE
    maybe("uneven", 0.2, "replicate")
    maybe("moment_dtype", 0.2, "bfloat16", "float32")
    if not outside:
        maybe("updates", 0.0 if tier == "params" else 0.2, "delta")
        if dtype == "bfloat16":  # in fp16 alone Adam's eps is zero
            maybe("master_dtype", 0.4, None, "remainder", "remainder")
            if config.get("master_dtype") == "remainder":
                config.pop("updates", None)  # refused together
    if stage >= 2:
        maybe("bucket_bytes", 0.3, 300, 3000)
        maybe("reduce_dtype", 0.2, "bfloat16", "float32")
    if stage == 3:
        maybe("compute_dtype", 0.15, "bfloat16")
        maybe("prefetch", 0.2, 2)
        if not tier.startswith("params"):
            maybe("reshard_after_forward", 0.2, False)
    if tier in ("stream", "params"):
        maybe("in_flight_bytes", 0.75, 600, 3000, 300)
        maybe("prefetch_state", 0.2, True)
    if "disk" in tier:
        maybe("buffer_bytes", 0.75, 16384, 40000)
    return config


def draw_reduce(rng, case: dict) -> str:
    step = case["config"]["stage"] < 3 and "BatchNorm" not in case["blocks"]  # refused for batch statistics
    return rng.choice(("auto", "microbatch", "step") if step else ("auto", "microbatch"))


def low_precision(config: dict) -> bool:
    """The run rounds where a plain one does not."""
    dtypes = (config.get(k) for k in ("moment_dtype", "compute_dtype", "reduce_dtype"))
    return any(d in ("bfloat16", "float16") for d in dtypes)


def draw_events(rng, case: dict) -> dict[str, dict]:
    """Up to three, by the number of steps before them."""
    known = [e for e in EVENTS if e != "skip" or can_skip(case)]
    if case["mesh"]["kind"] == "explicit":
        known = [e for e in known if e not in ("reshard", "restore")]
    if can_skip(case):
        known += ["skip"] * 8
    events = {}
    for at in rng.sample(range(1, case["steps"]), rng.choice((0, 1, 1, 2, 3))):
        event: dict[str, Any] = {"kind": rng.choice(known)}
        if event["kind"] in ("restore", "reshard"):
            # a mapping of params and state has no abstract form to restore files into
            tier = rng.choice([t for t in TIERS if case["flavour"] != "plain" or "disk" not in t])
            low = {"params": 3, "params and update": 3, "params and disk": 3}.get(tier, 2 if tier in OUTSIDE else 0)
            stage = max(low, rng.choice((0, 1, 2, 3)))
            event["mesh"] = {"kind": "flat", "n": rng.choice((1, 2, 3, 4, 5, 8))}
            event["config"] = draw_config(rng, case["dtype"], stage, tier)
            event["config"].pop("moment_dtype", None)  # what the numbers of the state are, does not change
            if "moment_dtype" in case["config"]:
                event["config"]["moment_dtype"] = case["config"]["moment_dtype"]
            drawn = event["config"].pop("master_dtype", None)
            if case["config"].get("master_dtype", "auto") is None and tier not in OUTSIDE:
                event["config"]["master_dtype"] = None
            elif drawn == "remainder":  # masters are the same values in both forms
                event["config"]["master_dtype"] = drawn
            no_master = case["config"].get("master_dtype", "auto") is None and tier in OUTSIDE
            if no_master or ((case.get("micro") or {}).get("reduce") == "step" and stage == 3):  # both refused
                event = {"kind": "evaluate"}
        if event["kind"] == "replace":
            event["leaf"] = rng.randrange(100)
        events[str(at)] = event
    return dict(sorted(events.items()))


def draw_files(rng, case: dict, at: int) -> None:
    """An event that reads files: a snapshot of those of a state on disk goes on, or params are read alone."""
    events, tier = case["events"], tier_at(case, at)
    kinds = ["resume"] * ("disk" in tier) + ["weights"] * ("late" not in tier)
    if not kinds:
        return
    event: dict[str, Any] = {"kind": rng.choice(kinds)}
    if event["kind"] == "weights":
        event["mesh"] = {"kind": "flat", "n": rng.choice((1, 2, 3, 4, 5, 8))}
        event["config"] = {"stage": rng.choice((0, 1, 2, 3)), "tier": "device", "min_shard_bytes": 0}
        if case["config"].get("master_dtype", "auto") is None:
            event["config"]["master_dtype"] = None
    case["events"] = dict(sorted({**events, str(at): event}.items()))


def can_be_eager(case: dict) -> bool:
    """A step outside of jit: not with layouts that JAX knows inside of one alone."""
    return case["mesh"]["kind"] == "flat" and not case["config"]["tier"].startswith("params")


def can_be_split(case: dict) -> bool:
    """Half of the devices for an axis of the model: not on to a mesh without one, nor outside of jit."""
    moved = any(e["kind"] in ("reshard", "restore") for e in case["events"].values())
    return case["mesh"]["kind"] == "flat" and case["mesh"]["n"] in (4, 6, 8) and case["step"] != "eager" and not moved


def can_skip(case: dict) -> bool:
    """A step with NaN changes nothing: the outermost wrap sees to it, and nothing else holds state."""
    return case["wraps"][-1:] == ["apply_if_finite"] and not set(case["blocks"]) & set(STATEFUL)


def stacks_of(case: dict) -> dict[str, int]:
    """The layers whose params are stacks for a scan, as `scan_axes=` names them."""
    prefix = "b" if case["flavour"] == "linen" else "blocks/"
    names = case.get("names") or [f"{prefix}{i}" for i in range(len(case["blocks"]))]
    return {name: 0 for name, kind in zip(names, case["blocks"], strict=True) if kind in STACKED}


def batch_parts(mesh: dict) -> int:
    """Into how many parts a batch is split."""
    return mesh["n"] // 2 if mesh["kind"] == "tp" else mesh["n"]


# --- coverage ---------------------------------------------------------------------------------------------------


def features(case: dict) -> Iterable[tuple[str, str]]:
    """What a case covers: (kind, name)."""
    yield "flavour", case["flavour"]
    yield "head", case["head"]
    yield "dtype", case["dtype"] + (f" in {case['compute']}" if case["compute"] else "")
    yield "mesh", case["mesh"]["kind"]
    if case["mesh"].get("levels"):
        yield "levels beside tensor parallelism", case["mesh"]["levels"]
    yield "devices", str(case["mesh"]["n"])
    yield "stage", str(case["config"]["stage"])
    yield "tier", case["config"]["tier"]
    yield "optimizer", case["optimizer"] + (" injected" if case["inject"] else "")
    yield "step", case["step"] + (" donated" if case["donate"] else "")
    if case.get("plan"):
        yield "plan of jzero.jit", case["flavour"]
    if case.get("closes"):
        yield "loss that closes over arrays", f"{case['flavour']}, {case['mesh']['kind']}"
    if case.get("names"):
        yield "layers named like fields", case["flavour"]
    if case.get("scan_axes"):
        yield "scan_axes", f"{case['scan_axes']}, {'stacks' if stacks_of(case) else 'no stack'}"
    places = configs_of(case)
    for codes in (config["gather_dtype"] for config in places if "gather_dtype" in config):
        by_axis = isinstance(codes, dict)
        yield "codes", f"{codes['gpu'] if by_axis else codes}, {case['config']['tier']}"
        if by_axis:
            yield "codes by axis", case["mesh"].get("levels") or case["mesh"]["kind"]
    for config in places:
        if config.get("reduce_dtype") in ("int8", "int4"):
            yield "gradient codes", f"{config['reduce_dtype']}, stage {config['stage']}, {config['tier']}"
        if "update_dtype" in config:
            yield "update codes", f"stage {config['stage']}, {config['tier']}"
    if any(config.get("master_dtype") == "remainder" for config in places):
        tier = case["config"]["tier"]  # it comes from an update outside of the program, or goes there
        yield "remainder", "outside" if tier in OUTSIDE else tier
    if case["config"].get("moment_dtype") == "int8":
        yield "int8", case["config"]["tier"]
    for name in ("reference", "sum", "aux", "weighed", "begins", "inside"):
        if case.get(name):
            yield name, case["flavour"]
    yield "compared", "fed" if case["fed"] else "free"
    yield "tier and flavour", f"{case['config']['tier']}, {case['flavour']}"
    for kind in sorted(set(case["blocks"])):
        yield "layer", kind
    if any("kept_gathered_bytes" in config for config in configs_of(case)):
        yield "stays gathered", f"{case['flavour']}, {case['mesh']['kind']}"
    if case.get("pieces"):
        yield "pieces", f"{case['flavour']}, {case['mesh']['kind']}"
        if case.get("tiles"):
            yield "pieces and tiles", f"{case['flavour']}, {case['head']}"
    if case.get("tiled"):
        for kind in sorted({*case["blocks"]} & {*TILED, "Dense", "LayerNorm"}):
            yield "tiled layer", f"{case['flavour']}, {kind}"
    if case.get("tiles"):
        drawn = case["tiles"]
        again = "recomputed" if drawn["recompute"] or drawn["reduction"] == "none" else "in the forward pass"
        yield "tiles", f"{case['flavour']}, {again}"
        yield "tiles of stage", f"{case['config']['stage']}, {case['mesh']['kind']}"
    for wrap in case["wraps"]:
        yield "wrap", wrap
        if wrap in RARE:
            yield "unusual state", case["config"]["tier"]
    for name, value in case["config"].items():
        if name not in ("stage", "tier", "quantize_block", "gather_dtype"):
            yield "field", f"{name}={value}"
    if case.get("trainable"):
        yield "trainable", f"{case['trainable']}, {case['flavour']}"
    if case.get("micro"):
        yield "micro-batches", f"{case['micro']['accumulate']} {case['micro']['reduce']}"
        for kind in sorted({*case["blocks"]} & {*STATEFUL}) or ["stateless"]:
            yield "micro-batches of", f"{case['flavour']}, {kind}"
    for event in case["events"].values():
        yield "event", event["kind"]
        yield "tier and event", f"{case['config']['tier']}, {event['kind']}"
        if event["kind"] == "weights":
            yield "weights", f"{case['flavour']}, {'statistics' if 'BatchNorm' in case['blocks'] else 'params alone'}"
        elif "config" in event:
            yield "from tier to tier", f"{case['config']['tier']}, {event['config']['tier']}"


SHARES = {
    "flavour": 0.25, "head": 0.02, "dtype": 0.05, "mesh": 0.02, "devices": 0.03, "stage": 0.05, "tier": 0.03,
    "optimizer": 0.005, "step": 0.01, "compared": 0.01, "layer": 0.015, "wrap": 0.01, "field": 0.01, "event": 0.01,
    "micro-batches": 0.002, "micro-batches of": 0.002, "trainable": 0.01, "tier and event": 0.0005, "scan_axes": 0.01,
    "tier and flavour": 0.008, "plan of jzero.jit": 0.02, "reference": 0.01, "sum": 0.01, "aux": 0.01, "weighed": 0.01,
    "begins": 0.03, "inside": 0.01, "weights": 0.003, "remainder": 0.001, "int8": 0.001,
    "layers named like fields": 0.01, "codes": 0.001, "codes by axis": 0.002, "gradient codes": 0.001,
    "update codes": 0.001, "tiles": 0.01, "tiles of stage": 0.001, "tiled layer": 0.001, "pieces": 0.001,
    "pieces and tiles": 0.0005, "stays gathered": 0.001,
}  # fmt: skip
"""The least share of the cases of a nightly run that each name of a kind must have."""
