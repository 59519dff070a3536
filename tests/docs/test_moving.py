"""docs/from_*.md: the jzero side of each diff runs and engages, and every key of DeepSpeed has a row."""

from __future__ import annotations

import json
import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import Small, batch, create_small
from scripts import DOCS, load

import jzero
from jzero.deepspeed.keys import KEYS

NAMES = ["deepspeed", "fsdp2", "maxtext", "named_shardings"]
PAGES = {name: (DOCS / f"from_{name}.md").read_text() for name in NAMES}
PAGE = PAGES["deepspeed"]
DIFFS = [(name, re.findall(r"```diff\n(.*?)```", page, re.DOTALL)[0]) for name, page in PAGES.items()]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(32)(nn.gelu(nn.Dense(64)(x)))


class Model(nn.Module):
    block: type[nn.Module]

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(32)(x)[:, None]  # a sequence of one
        for _ in range(2):
            x = self.block()(x)
        return nn.Dense(6)(x[:, 0])


def jzero_side(diff: str) -> str:
    return "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))


def test_every_line_of_a_diff_is_on_a_side():
    assert sorted(f"from_{name}.md" for name in NAMES) == sorted(p.name for p in DOCS.glob("from_*.md"))
    assert all(re.match(r"[-+ ]|$", line) for _, diff in DIFFS for line in diff.splitlines())
    assert all("jzero" not in line for _, diff in DIFFS for line in diff.splitlines() if line.startswith("-"))


@pytest.mark.default_cases("fsdp2")
@pytest.mark.parametrize(("name", "diff"), DIFFS, ids=[name for name, _ in DIFFS])
def test_the_jzero_side_runs(name, diff, tmp_path, monkeypatch):
    """Four steps on one batch: the loss falls, params are stored in parts, the fields are those it says."""
    monkeypatch.chdir(tmp_path)
    config = re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert config is not None
    Path("ds_config.json").write_text(config[1])
    model, start = Small(), create_small(optax.sgd(0.1))
    losses = []

    def loss_of(out, batch):
        loss = jnp.mean((out.astype(jnp.float32) - batch["y"]) ** 2)
        jax.debug.callback(lambda x: losses.append(float(x)), loss)
        return loss

    names = {
        "model": model, "params": start.params, "batches": [batch()] * 4, "loss_of": loss_of, "Block": Block,
        "Model": Model, "create_state": lambda: create_small(optax.sgd(0.1)),
    }  # fmt: skip
    exec(jzero_side(diff), names)
    jax.effects_barrier()
    state = names["state"]
    plan = jzero.plan_of(state)
    assert int(state.step) == 4
    assert np.mean(losses[-2:]) < np.mean(losses[:2])
    kernel = state.params["Dense_0"]["kernel"]
    assert kernel.size // kernel.addressable_shards[0].data.size == (4 if name == "fsdp2" else 8)
    if name == "deepspeed":
        assert kernel.dtype == jnp.bfloat16
        assert plan.config == jzero.ZeroConfig(stage=3, bucket_bytes=100_000_000)
        code = "\n".join(names["found"].code)
        for line in jzero_side(diff).splitlines():
            if line.startswith(("tx = ", "params = ")):
                assert line in code, "the page's lines are those that read says"
        assert jzero.checkpoint.verify(tmp_path / "checkpoints/last")
        return
    assert kernel.dtype == jnp.float32
    assert plan.config.compute_dtype == (None if name == "named_shardings" else jnp.bfloat16)


def test_every_key_of_deepspeed_has_a_row():
    assert "<!-- keys -->" in PAGE
    rows = load("deepspeed_keys").table()
    assert [name for name in KEYS if f"`{name.rpartition('.')[2]}`" not in rows] == []
    assert "| `stage` |" in rows


def test_the_other_blocks(tmp_path, monkeypatch):
    """The python block of the page, as it stands, on the page's config."""
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    config = json.loads(re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)[0])
    Path("ds_config.json").write_text(json.dumps(config | {"train_batch_size": 128}))
    names: dict = {"jzero": jzero}
    exec(block, names)
    found = names["found"]
    assert (found.config.stage, found.accumulate, found.clip) == (3, 2, 1.0)
