"""PureJaxRL's `ppo.py` as it is in a checkout: environments, rollouts and updates in one `jax.jit`.

Its `wrappers.py` imports brax and navix for environments that are not used here; empty modules stand for them.
"""

import sys
from pathlib import Path
from unittest import mock

import jax

import jzero  # +

# ruff: noqa: F821 - `benchmarks/compatibility.py` sets STAGE and FOLDER, and takes one of two lines
folder = Path(FOLDER) / "purejaxrl" / "purejaxrl"
sys.path[:0] = [str(folder)]
sys.modules |= {name: mock.MagicMock() for name in ("brax", "brax.envs", "brax.envs.wrappers.training", "navix")}
source = (folder / "ppo.py").read_text()


def replaced(text, count, old, new):
    assert text.count(old) == count, f"ppo.py has {old!r} {text.count(old)} times, not {count}"
    return text.replace(old, new)


shard, split = "train_state = jzero.shard(train_state, stage=STAGE)", "jax.lax.with_sharding_constraint"  # +
source = replaced(source, 1, "# INIT ENV\n", f"{shard}; split_batch = jzero.plan_of(train_state).batch\n")  # +
source = replaced(source, 1, "# TRAIN LOOP\n", f"obsv, env_state = {split}((obsv, env_state), split_batch)\n")  # +
source = replaced(source, 1, " = batch_info\n", f" = {split}(batch_info, split_batch)\n")  # +
source = replaced(source, 3, "network.apply(", "train_state.apply_fn(")  # +
config = {
    "LR": 2.5e-4, "NUM_ENVS": 16, "NUM_STEPS": 64, "TOTAL_TIMESTEPS": 16 * 64 * 4, "UPDATE_EPOCHS": 4,
    "NUM_MINIBATCHES": 4, "GAMMA": 0.99, "GAE_LAMBDA": 0.95, "CLIP_EPS": 0.2, "ENT_COEF": 0.01, "VF_COEF": 0.5,
    "MAX_GRAD_NORM": 0.5, "ACTIVATION": "tanh", "ENV_NAME": "CartPole-v1", "ANNEAL_LR": True,
}  # fmt: skip
names = {"__name__": "ppo"}
names |= {"jzero": jzero, "STAGE": STAGE}  # +
exec(compile(source, str(folder / "ppo.py"), "exec"), names)
train = jax.jit(names["make_train"](config))


def step(state, key):
    """A run of four rollouts with 16 updates each from a key; its mean return instead of a loss."""
    out = train(key)
    return out["runner_state"][0], out["metrics"]["returned_episode_returns"].mean()


updates = 4 * config["UPDATE_EPOCHS"] * config["NUM_MINIBATCHES"]
args = (None,)
batches = [jax.random.PRNGKey(seed) for seed in range(30, 35)]
