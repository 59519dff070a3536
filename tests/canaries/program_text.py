"""The text of a compiled program, its arguments and its statistics."""

from __future__ import annotations

import re

from canaries import check, differences, lacking
from canaries.imported_names import ROOT
from canaries.jaxpr import matrix
from canaries.programs import computations, cpu_lowered, cpu_step, gpu_text, lines_with, op_names


def name_stacks_in(text: str) -> str:
    """What of the name stacks jzero reads is not in a program."""
    stacks = op_names(text)
    parts = {
        "a forward pass, jvp(": lambda s: "jvp(" in s and "transpose(" not in s,
        "a backward pass, transpose(jvp(": lambda s: "transpose(jvp(" in s,
        "a second run of a remat region, rematted_computation": lambda s: "rematted_computation" in s,
        "a loop, /while/body/": lambda s: "/while/body/" in s,
        "a named scope, /jzero.update/": lambda s: "/jzero.update/" in s,
        "a backward loop": lambda s: re.search(r"transpose\(jvp\(.*\)\)/while/body/", s),
        "a primitive at the end, /tanh": lambda s: s.endswith("/tanh"),
    }
    found = [f"no op_name of {what}" for what, is_one in parts.items() if not any(map(is_one, stacks))]
    odd = [s for s in stacks if "/" in s and not s.startswith(("jit(step)/", "(jit(step)/"))]
    return "; ".join(found + [f"begins otherwise: {s}" for s in odd[:1]])


def loops_in(text: str) -> str:
    """What of the loops jzero reads is not in a program."""
    loops = lines_with(text, " while(")
    trips = sorted(re.findall(r'"known_trip_count":\{"n":"(\d+)"', "\n".join(loops)))
    bodies = [b for line in loops for b in re.findall(r"\bbody=%?([\w.\-]+)", line)]
    rows = [
        ("trips", trips, ["5", "5", "7", "7"]),
        ("bodies", all(b in computations(text) for b in bodies), True),
    ]
    return differences(rows)


def layout_of_text(text: str) -> str:
    """What of the form of a program's text jzero does not know."""
    head, tables = text.split("\n", 1)[0], computations(text)
    aliases = re.search(r"input_output_alias=\{(.*?)\}, (?:entry|num_|allow|frontend|replica|buffer)", head)
    instruction = re.compile(
        r"(ROOT )?%?[\w.\-]+ = (\(.*?\)|[a-z]\w*\[[\d,<=]*\](?:\{[^}]*\})?) [a-z][\w\-]*\(", re.ASCII
    )
    odd = [line for lines in tables.values() for line in lines if not instruction.match(line.strip())]
    rows = [
        ("head", head.startswith("HloModule"), True), ("num_partitions", "num_partitions=8" in head, True),
        ("aliased parameters", re.findall(r": \((\d+), ", aliases[1]) if aliases else head[:120], ["0", "1", "2"]),
        ("an entry", "ENTRY" in tables, True),
        ("a root in each computation", {sum(line.startswith("  ROOT ") for line in lines) for lines in tables.values()},
         {1}),
        ("lines of another form", odd[:1], []),
        ("parameters", sorted(re.findall(r" parameter\((\d+)\)", "\n".join(tables.get("ENTRY", ())))), list("0123")),
    ]  # fmt: skip
    return differences(rows)


@check("proof/places.py, proof/unrolled.py, proof/transfers.py")
def cpu_name_stacks():
    """op_name is the name stack: jit(step)/..., jvp(, transpose(jvp(, rematted_computation, while/body, jzero. scopes,
    the primitive last (a program for the CPU)."""
    return name_stacks_in(cpu_step().as_text())


@check("proof/places.py, proof/unrolled.py, proof/transfers.py", gpu=True)
def gpu_name_stacks():
    """The same of a program for GPUs."""
    return name_stacks_in(gpu_text())


@check("proof/hlo.py, proof/collectives.py")
def cpu_trip_counts():
    """A while has known_trip_count in its backend_config and names its body (a program for the CPU)."""
    return loops_in(cpu_step().as_text())


@check("proof/hlo.py, proof/collectives.py", gpu=True)
def gpu_trip_counts():
    """The same of a program for GPUs."""
    return loops_in(gpu_text())


@check("proof/hlo.py")
def cpu_program_text():
    """as_text(): HloModule with input_output_alias and num_partitions; computations from `%name (...) -> ... {` to `}`,
    one root in each; an instruction is `name = type opcode(` (a program for the CPU)."""
    return layout_of_text(cpu_step().as_text())


@check("proof/hlo.py", gpu=True)
def gpu_program_text():
    """The same of a program for GPUs."""
    return layout_of_text(gpu_text())


@check("proof/arguments.py, proof/report.py")
def arguments_of_a_program():
    """args_info and input_shardings of a compiled program are trees alike, with shapes, dtypes and NamedShardings; None
    for an argument that it does not use."""
    import jax

    compiled = cpu_step()
    infos, tree = jax.tree_util.tree_flatten_with_path(compiled.args_info)
    shardings = tree.flatten_up_to(compiled.input_shardings)
    unused = jax.jit(lambda x, y: x).lower(matrix(2), matrix(3)).compile()
    flat = jax.tree_util.tree_structure(unused.args_info).flatten_up_to(unused.input_shardings)
    rows = [
        ("paths", [jax.tree_util.keystr(k) for k, _ in infos][-1], "[0][1]"),
        ("specs", tuple(shardings[0].spec), (("data", "model"),)),
        ("shapes and dtypes", (infos[0][1].shape, str(infos[0][1].dtype)), ((512, 512), "float32")),
        ("an argument that is not used", flat[1], None),
    ]
    return differences(rows)


@check("core/compile_only.py, proof/report.py")
def memory_statistics():
    """memory_analysis() has the byte counts that jzero reports, those of host memory too."""
    fields = [f"{where}{what}_size_in_bytes" for where in ("", "host_") for what in
              ("argument", "output", "alias", "temp", "generated_code")]  # fmt: skip
    stats = cpu_step().memory_analysis()
    missing = lacking("statistics", [*fields, "peak_memory_in_bytes"], dir(stats))
    arguments = 4 * (7 * 512 * 512 // 8 + 512 * 512 // 2 + 512 * 512 // 8 + 64 * 512 // 8)
    return missing or differences([("bytes of arguments", stats.argument_size_in_bytes, arguments)])


@check("core/compile_only.py")
def lowered_parts():
    """jax.stages.Lowered holds _lowering with stablehlo(), compile_args, const_args, _device_list and
    _compiler_options_kvs."""
    source = (ROOT / "jzero/core/compile_only.py").read_text()
    lowering = cpu_lowered()._lowering
    attributes = ("stablehlo", "compile_args", "const_args", "_device_list", "_compiler_options_kvs")
    return lacking("_lowering", attributes, dir(lowering)) or lacking(
        "compile_args", re.findall(r'\bargs\["(\w+)"\]', source), lowering.compile_args
    )


@check("comm/gradients.py, gather/loops.py, update/sharded_update.py")
def constraint_chains():
    """The partitioner is Shardy, and a chain of two constraints on one value is two sdy.sharding_constraint, the first
    one read by the second."""
    import jax

    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    whole, split = (jax.NamedSharding(mesh, jax.P(axis)) for axis in (None, "data"))

    def chain(x):
        return jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(x * 2, whole), split) * 3

    text = jax.jit(chain).lower(matrix(8, 8)).as_text()
    found = re.findall(r"(%\w+) = sdy\.sharding_constraint (%\w+) <@mesh, \[(\{[^}]*\})", text)
    read = [operand for _, operand, _ in found]
    rows = [("constraints", [axes for *_, axes in found], ["{}", '{"data"}']),
            ("the second reads the first", read[1:], [name for name, *_ in found[:1]])]  # fmt: skip
    return differences(rows)
