"""Collectives in a program for GPUs."""

from __future__ import annotations

import re

from canaries import check, constant, differences, lacking
from canaries.host_memory import host_step
from canaries.programs import compiled_for, computations, gpu_mesh, gpu_step, gpu_text, op_names

KINDS = (
    "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute",  # the step has these
    "ragged-all-to-all", "collective-broadcast",
)  # fmt: skip


@check("proof/collectives.py, proof/places.py", gpu=True)
def collective_opcodes():
    """What has replica groups or source-target pairs is one of seven opcodes, plain or -start; all kinds that the step
    asks for are there."""
    found = {}
    for line in gpu_text().splitlines():
        if "replica_groups=" in line or "source_target_pairs=" in line:
            opcode = re.search(r"(?:\)|\}|\]|\)) ([a-z][\w\-]*)\(", line.partition(" = ")[2])
            found[opcode[1].removesuffix("-start") if opcode else line[:80]] = line
    odd = sorted(set(found) - set(constant("proof.collectives", "SENDS", KINDS)))
    return lacking("the program", KINDS[:5], found) or differences([("other opcodes", odd, [])])


@check("proof/collectives.py, proof/transfers.py", gpu=True)
def collective_pairs():
    """A -start is read by exactly one -done, whose result is the collective's; async-start calls a computation; a pair
    that blocks says `"is_sync":true`."""
    odd = []
    for lines in computations(gpu_text()).values():
        for line in lines:
            name, _, rest = line.strip().removeprefix("ROOT ").partition(" = ")
            opcode = re.search(rf" ((?:{'|'.join(KINDS)}|async)-start)\(", rest)
            if not opcode:
                continue
            readers = [x for x in lines if re.search(rf"\({re.escape(name)}[,)]", x) and "-done(" in x]
            if len(readers) != 1:
                odd.append(f"{name} has {len(readers)} -done")
            if opcode[1] == "async-start" and "calls=" not in rest:
                odd.append(f"{name} calls nothing")
    if '"is_sync":' not in gpu_text():
        odd.append("no is_sync in any backend_config")
    return "; ".join(odd)


@check("proof/groups.py", gpu=True)
def group_notations():
    """replica_groups is a list {{0,1},{2,3}}, an iota [2,4]<=[8]T(1,0) or mesh['data'=2,'model'=4] {'model'}."""
    numbers = r"[\d,]+"
    forms = "|".join(
        (r"\{\}", rf"\{{\{{{numbers}\}}(?:,\{{{numbers}\}})*\}}", rf"\[{numbers}\]<=\[{numbers}\](?:T\({numbers}\))?",
         r"mesh\['\w+'=\d+(?:,'\w+'=\d+)*\](?:, ?device_ids=\((?:[^()]|\([^()]*\))*\))? ?\{'[^}]*'\}")
    )  # fmt: skip
    written = re.findall(
        r"replica_groups=(.{1,200}?), (?:dimensions|use_global|channel|to_apply|backend|meta|front)",
        gpu_text(),
    )
    odd = sorted({w for w in written if not re.fullmatch(forms, w)})
    return differences([("any", bool(written), True), ("others", odd, [])])


@check("proof/groups.py, proof/collectives.py", gpu=True)
def groups_by_axes():
    """From the groups jzero reads the mesh axes that the step names, and every collective has bytes and a phase."""
    import jzero

    report = jzero.explain(gpu_step())
    axes = {kind: {c.axes for c in report.collectives if c.op == kind} for kind in
            ("all-to-all", "collective-permute", "all-gather", "reduce-scatter")}  # fmt: skip
    rows = [
        ("all-to-all", ("model",) in axes["all-to-all"], True),
        ("collective-permute", axes["collective-permute"], {("data",)}),
        ("all-gather", {("data",), ("data", "model")} <= axes["all-gather"], True),
        ("reduce-scatter", ("data", "model") in axes["reduce-scatter"], True),
        ("without bytes", [c.op for c in report.collectives if not c.wire_bytes], []),
        ("phases", {"forward", "backward"} <= {c.phase for c in report.collectives}, True),
    ]
    return differences(rows)


@check("proof/places.py", gpu=True)
def joined_names():
    """An op_name of joined operations is prefix/(a:b), or (a:b), each part with its own scopes and primitive (jaxlib
    0.12); jzero reads each as a name stack with closed brackets."""
    import jax
    import jax.numpy as jnp

    from jzero.proof.places import joined_names

    def gathers(x, first, second, third):
        h = jnp.tanh(x @ whole(first))
        h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ whole(second)), None), h, length=4)
        return jnp.sum(h @ whole(third))

    def whole(x):
        return jax.lax.with_sharding_constraint(x, jax.NamedSharding(gpu_mesh(), jax.P()))

    combined = compiled_for(jax.grad(gathers, argnums=(1, 2, 3)), *[(512, 512)] * 4)
    odd = []
    for text in (gpu_text(), host_step().as_text(), combined):
        for stack in op_names(text):
            parts = joined_names(stack)
            if re.match(r"(.*/)?\(.*:.*\)$", stack) and len(parts) == 1:
                odd.append(f"not taken apart: {stack}")
            odd += [f"{stack}: {p}" for p in parts if p.count("(") != p.count(")")]
    return "; ".join(odd[:2])


@check("comm/reduce_scatter.py, proof/slices.py", gpu=True)
def reduce_scatter_made():
    """XLA:GPU makes a reduce-scatter of an all-reduce of which each device takes its slice."""
    found = [x for x in gpu_text().splitlines() if re.search(r" reduce-scatter(-start)?\(", x)]
    return (
        "" if any("f32[64,512]" in x for x in found) else f"{len(found)} reduce-scatters, none of f32[64,512]"
    )


@check("gather/loops.py", gpu=True)
def reduction_leaves_loop():
    """The gradient of a weight that every round of a loop uses, constrained whole and then to its shard, is reduced
    once after the loop (while-loop-all-reduce-code-motion)."""
    tables = computations(gpu_text())
    loops = [x for lines in tables.values() for x in lines if '"known_trip_count":{"n":"5"' in x]
    bodies = [b for x in loops for b in re.findall(r"\bbody=%?([\w.\-]+)", x)]
    inside = [x.strip()[:100] for b in bodies for x in tables[b] if "replica_groups=" in x]
    after = any(re.search(r" reduce-scatter(-start)?\(", x) for x in tables["ENTRY"])
    return differences(
        [("loops of 5 rounds", len(loops), 2), ("collectives in them", inside, []), ("after", after, True)]
    )
