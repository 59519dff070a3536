"""Losses and states with a mistake that `jzero.check` finds, and programs with another text."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax._src.source_info_util import NameStack
from jax.sharding import PartitionSpec as P
from programs import QUICK, gpt_step, tokens

import jzero
from jzero.core.traces import keep_trace, trace_of
from jzero.proof.check import findings
from jzero.proof.record import names_are_known


def constrained(tree, spec):
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, spec(x)), tree)


def whole(tree, mesh):
    return constrained(tree, lambda x: jax.NamedSharding(mesh, P()))


def found_in(state, plan, step=gpt_step, *, batch=None, donate=0, options=QUICK):
    batch = tokens() if batch is None else batch
    program = jzero.pod("h200").compile(
        step, state, batch, donate_argnums=donate, plan=plan, compiler_options=options
    )
    return {f.kind: f for f in findings(program, plan)}


BOTH = pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])


def in_a_loop(grads_of, zeros, parts):
    return jax.lax.scan(
        lambda total, part: (jax.tree.map(jnp.add, total, grads_of(part)), None), zeros, parts
    )[0]


def unrolled_by_python(grads_of, zeros, parts):
    total = zeros
    for i in range(len(jax.tree.leaves(parts)[0])):
        total = jax.tree.map(jnp.add, total, grads_of(jax.tree.map(lambda x: x[i], parts)))  # noqa: B023
    return total


def in_host_memory(tree):
    """The abstract arrays of a state in pinned host memory, its scalars on the device."""

    def move(x):
        return x.update(sharding=x.sharding.with_memory_kind("pinned_host")) if x.ndim else x

    return jax.tree.map(move, tree)


def on_device(tree):
    return jax.tree.map(lambda x: x.update(sharding=x.sharding.with_memory_kind("device")), tree)


@contextlib.contextmanager
def renamed_derivatives():
    """A jax that names the passes of a derivative otherwise, in traces and in programs."""
    names, transform = {"jvp": "fwd", "transpose": "bwd"}, NameStack.transform
    names_are_known.cache_clear()
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)  # or a cached program has its own names
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NameStack, "transform", lambda self, name: transform(self, names.get(name, name)))
        try:
            yield
        finally:
            jax.config.update("jax_compilation_cache_include_metadata_in_key", False)
            names_are_known.cache_clear()


def with_text(compiled, text):
    """The same program, as if XLA had written this text of it."""
    other = copy.copy(compiled)
    other._executable = copy.copy(compiled._executable)
    other._executable._program = dataclasses.replace(compiled._executable._program, text=text)
    keep_trace(other, trace_of(compiled))
    return other


def without_asynchronous_copies(text):
    """Each `copy-done(%start)` becomes a `copy` of what its `copy-start` has read."""
    lines, sources = [], {}
    for line in text.splitlines():
        call = re.search(r" copy-(start|done)\(.*?%([\w.-]+)\)", line)
        if call and call[1] == "start":
            sources[re.match(r" *%([\w.-]+) = ", line)[1]] = call[2]
            continue
        if call:
            line = line.replace(call[0], f" copy(%{sources[call[2]]})")
        lines.append(line)
    return "\n".join(lines)
