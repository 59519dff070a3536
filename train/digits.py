"""Train an NNX classifier on scikit-learn's handwritten digits with ZeRO stage 3.

    python train/digits.py                    # 8 simulated devices (or all GPUs)
    python train/digits.py --stage 0          # plain data parallelism: the same accuracy

1,797 images of 8 x 8 pixels; a fixed fifth of them is held out. Exit code 1 below 95 % on those.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from pathlib import Path

if not __package__:  # run as a script: import from the repository, wherever the shell stands
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from sklearn import datasets

import jzero

PASS = 0.95
HELD_OUT = 360  # images


@dataclasses.dataclass(frozen=True)
class Config:
    """A run of train/digits.py."""

    stage: int = 3
    """ZeRO stage: 0 (plain data parallelism), 1, 2 or 3."""
    epochs: int = 12
    """Passes over the training images."""
    batch: int = 64
    """Images in a batch, over all devices; a multiple of their number."""
    lr: float = 2e-3
    """Peak learning rate of AdamW; a cosine takes it to zero."""
    width: int = 256
    """Features of the hidden layers."""
    devices: int = 8
    """Simulated CPU devices where there is no GPU."""


class Classifier(nnx.Module):
    """Two hidden layers, the second of them residual."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.first = nnx.Linear(64, width, rngs=rngs)
        self.second = nnx.Linear(width, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.last = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, images):
        """f32[batch, 64] -> logits f32[batch, 10]."""
        x = nnx.relu(self.first(images))
        return self.last(self.norm(x + nnx.relu(self.second(x))))


def load() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Train and held-out {"image": f32[n, 64] in 0..1, "label": i32[n]}: always the same split."""
    pixels, labels = datasets.load_digits(return_X_y=True)
    images, labels = (pixels / 16).astype(np.float32), np.asarray(labels, np.int32)
    order = np.random.default_rng(0).permutation(len(labels))

    def part(rows):
        return {"image": images[rows], "label": labels[rows]}

    return part(order[HELD_OUT:]), part(order[:HELD_OUT])


@nnx.jit
def train_step(model: Classifier, optimizer: nnx.Optimizer, batch: dict[str, jax.Array]) -> jax.Array:
    """One update, in place; the mean loss."""

    def loss_of(model):
        logits = model(batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    # at stage 3 each weight is gathered where it is used; below it this line changes nothing
    gathering = jzero.gather_on_use(loss_of, jzero.plan_of(optimizer))
    loss, grads = nnx.value_and_grad(gathering)(model)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def accuracy(model: Classifier, batch: dict[str, jax.Array]) -> jax.Array:
    """The share of images with the right label."""
    return (model(batch["image"]).argmax(-1) == batch["label"]).mean()


def train(config: Config) -> float:
    """Trains, prints, and returns the accuracy on the held-out images."""
    devices = jax.device_count()
    if config.batch % devices or HELD_OUT % devices:
        raise ValueError(
            f"{devices} devices must divide --batch {config.batch} and the {HELD_OUT} held-out images. "
            "Pass another --batch, or --devices 8."
        )
    began = time.perf_counter()
    images, heldout = load()
    per_epoch = len(images["label"]) // config.batch
    tx = optax.adamw(optax.cosine_decay_schedule(config.lr, config.epochs * per_epoch), weight_decay=1e-2)

    def create():
        model = Classifier(config.width, nnx.Rngs(0))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    mesh = jax.make_mesh((devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    model, optimizer = jzero.shard(create, stage=config.stage, mesh=mesh)
    plan = jzero.plan_of(optimizer)
    print(plan.describe())

    rng = np.random.default_rng(1)
    for epoch in range(1, config.epochs + 1):
        order = rng.permutation(len(images["label"]))
        losses = []
        for i in range(per_epoch):
            rows = order[i * config.batch : (i + 1) * config.batch]
            batch = plan.place_batch({name: array[rows] for name, array in images.items()})
            losses.append(train_step(model, optimizer, batch))
        print(f"epoch {epoch}/{config.epochs}  loss {float(jnp.stack(losses).mean()):.4f}")

    right = float(accuracy(model, plan.place_batch(heldout)))
    where = f"stage {config.stage}, {devices} devices, {time.perf_counter() - began:.0f} s"
    print(f"{right:.2%} of {HELD_OUT} held-out images; {where}")
    return right


def main(args: list[str] | None = None) -> None:
    """The command line; exits with 1 below 95 %."""
    config = tyro.cli(Config, args=args)
    os.environ.setdefault(
        "NPROC", "32"
    )  # XLA:CPU: fewer threads than simulated devices can wait for each other
    jax.config.update("jax_num_cpu_devices", config.devices)
    right = train(config)
    if right < PASS:
        sys.exit(f"below {PASS:.0%}")


if __name__ == "__main__":
    main()
