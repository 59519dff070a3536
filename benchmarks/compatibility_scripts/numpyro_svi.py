"""A variational autoencoder in the loop of NumPyro's docs: `SVI.update` on an `SVIState`."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
from jax.example_libraries import stax
from numpyro import distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.optim import optax_to_numpyro

import jzero  # +

# ruff: noqa: F821 - `benchmarks/compatibility.py` sets STAGE, and takes one of two lines
PIXELS, WIDTH, LATENT = 784, 512, 64

encoder = stax.serial(
    stax.Dense(WIDTH), stax.Softplus, stax.FanOut(2),
    stax.parallel(stax.Dense(LATENT), stax.serial(stax.Dense(LATENT), stax.Exp)),
)  # fmt: skip
decoder = stax.serial(stax.Dense(WIDTH), stax.Softplus, stax.Dense(PIXELS), stax.Sigmoid)


def model(batch):
    decode = numpyro.module("decoder", decoder, (len(batch), LATENT))
    with numpyro.plate("batch", len(batch)):
        z = numpyro.sample("z", dist.Normal(jnp.zeros(LATENT), 1.0).to_event(1))
        numpyro.sample("x", dist.Bernoulli(decode(z)).to_event(1), obs=batch)


def guide(batch):
    encode = numpyro.module("encoder", encoder, (len(batch), PIXELS))
    mean, std = encode(batch)
    with numpyro.plate("batch", len(batch)):
        numpyro.sample("z", dist.Normal(mean, std).to_event(1))


tx = optax.adam(1e-3)
svi = SVI(model, guide, tx, Trace_ELBO())
batches = [np.random.default_rng(seed).integers(0, 2, (32, PIXELS)).astype(np.float32) for seed in range(5)]
state = svi.init(jax.random.key(0), batches[0])
params = svi.optim.get_params(state.optim_state)
plan = jzero.make_plan(params, stage=STAGE)  # +
tx, params = jzero.zero(tx, plan), plan.place(params)  # +
svi.optim = optax_to_numpyro(tx)  # +
evaluate = svi.optim.eval_and_update  # +
svi.optim.eval_and_update = lambda fn, *a, **k: evaluate(jzero.gather_on_use(fn, plan), *a, **k)  # +
state = state._replace(optim_state=(jnp.array(0), (params, jax.jit(tx.init)(params))))  # +
step = jax.jit(svi.update, donate_argnums=0)  # -
step = jzero.jit(svi.update, plan)  # +
args = (state,)
