"""What a transformer holds besides its states, in closed form: saved activations, and what is alive on top."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from jzero.core.errors import check_dtype, check_flag, check_int, check_kind, nearest
from jzero.core.token_loss import TILE_BYTES

WHERE = "jzero.estimate: model"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transformer:
    """The sizes that `estimate` needs to count a transformer's activations: of the part that one device computes.

    Args:
      layers: blocks.
      width: features of the residual stream.
      heads: attention heads.
      seq: tokens in a sequence.
      batch: sequences in one device's part of a micro-batch.
      vocab: rows of the logits; 0 leaves them out.
      ffn: features inside of the MLP. None: 4 x width.
      dtype: of the activations.
      remat: True: a block's input is saved and the block is computed again in the backward pass. False: all
        that the backward pass reads is saved.
      flash: attention scores are never stored whole (flash attention).
      partition: devices over which a saved input is split (`jzero.remat(Block, plan, partition=)`).
      offload: saved inputs wait in host memory (`jzero.remat(Block, plan, offload="host")`); two are on the device, one
        on its way out or in and one at work.
      tiled_loss: the loss is `jzero.tiled_loss`, which holds the logits of a tile and the head's fp32 gradient.
      mlp_tiles: tiles in which the MLP runs (`jzero.tiled`): the values inside of it are those of one tile, and none of
        them is saved.

    Raises:
      TypeError: a size is not an integer, a flag not a bool, `dtype` not a dtype.
      ValueError: a size below 1 (`vocab`: below 0); `dtype` is not floating; `partition` or `offload` without `remat`.

    Example:
      >>> Transformer(layers=36, width=4096, heads=32, seq=1024).saved  # 36 inputs, bf16[1024,4096]
      301989888

    References:
      Rajbhandari et al., ZeRO (arXiv:1910.02054), section 6.1 (one checkpoint per layer); Korthikanti et al.
      (arXiv:2205.05198), equation 1: s b h (34 + 5 a s / h) bytes per layer in 16 bits.
    """

    layers: int
    width: int
    heads: int
    seq: int
    batch: int = 1
    vocab: int = 0
    ffn: int | None = None
    dtype: DTypeLike = "bfloat16"
    remat: bool = True
    flash: bool = False
    partition: int = 1
    offload: bool = False
    tiled_loss: bool = False
    mlp_tiles: int = 1

    def __post_init__(self):
        check_dtype(self.dtype, "dtype", where=WHERE)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("remat", "flash", "offload", "tiled_loss"):
                check_flag(value, field.name, where=WHERE)
            elif field.name != "dtype" and not (field.name == "ffn" and value is None):
                check_int(value, field.name, where=WHERE, low=0 if field.name == "vocab" else 1)
        if not self.remat and (self.offload or self.partition > 1):
            raise ValueError(f"{WHERE}: with remat=False no block input is saved that could be split or offloaded.")

    @property
    def _kept(self) -> int:
        """Bytes that one block keeps for its backward pass, wherever they wait."""
        if not self.remat:
            return self._read(self._inside if self.mlp_tiles == 1 else 0)
        return self._stream * jnp.dtype(self.dtype).itemsize // self.partition

    @property
    def _stream(self) -> int:
        """Values of one residual stream."""
        return self.batch * self.seq * self.width

    @property
    def block(self) -> int:
        """Bytes that the backward pass of one block reads: 34 s b h + 5 a s^2 b in 16 bits, MLP of 4 h."""
        return self._read(self._inside / self.mlp_tiles)

    @property
    def _inside(self) -> float:
        """The MLP's hidden values before and after the nonlinearity, in values of the stream."""
        return 2 * (4 if self.ffn is None else self.ffn / self.width)

    def _read(self, inside: float) -> int:
        """Bytes of what a backward pass reads of one block, with these values inside of the MLP."""
        # in values of the stream: inputs of 2 norms, q/k/v's input, q, k, v, context, 2 dropout masks of half
        # a value, the MLP's input
        scores = 0 if self.flash else 2.5 * self.heads * self.seq / self.width
        return round(self._stream * (9 + inside + scores) * jnp.dtype(self.dtype).itemsize)

    @property
    def saved(self) -> int:
        """Device bytes kept from the forward to the backward pass: block inputs, or all that a backward pass reads."""
        return (min(2, self.layers) if self.offload else self.layers) * self._kept

    @property
    def host(self) -> int:
        """Bytes of block inputs in host memory."""
        return self.layers * self._kept if self.offload else 0

    @property
    def recomputed(self) -> int:
        """Bytes that are made again in the backward pass instead of saved, over all blocks."""
        kept = self._stream * jnp.dtype(self.dtype).itemsize if self.remat else self._kept
        return self.layers * (self._read(self._inside) - kept)

    @property
    def working(self) -> int:
        """Bytes alive on top at worst: one block or tile computed again, or fp32 logits and their gradient."""
        return self.working_with(4 * self.width * self.vocab)

    def working_with(self, head: int) -> int:
        """The same, where `head` bytes are alive of the fp32 gradient of a tiled loss's head."""
        logits = 4 * self.batch * self.seq * self.vocab
        loss = min(logits, TILE_BYTES) * 3 // 2 + head if self.tiled_loss else 2 * logits
        again = self.block if self.remat else 0 if self.mlp_tiles == 1 else self.block - self._kept
        return max(again, loss)


def transformer_of(model: Mapping[str, Any] | Transformer | None, *, where: str) -> Transformer | None:
    """The sizes in a mapping.

    Raises:
      TypeError: not a mapping, a size that is missing, unknown or of another type.
      ValueError: as `Transformer`.
    """
    if model is None or isinstance(model, Transformer):
        return model
    rule = "a mapping of sizes, {'layers': 32, 'width': 4096, ...}"
    check_kind(model, "model", Mapping, rule, where=where, optional=True)
    fields = {f.name: f.default is dataclasses.MISSING for f in dataclasses.fields(Transformer)}
    for name in model:
        if name not in fields:
            raise TypeError(f"{where}: model has no size {name!r}.{nearest(str(name), fields)}")
    missing = [name for name, needed in fields.items() if needed and name not in model]
    if missing:
        raise TypeError(f"{where}: model lacks {', '.join(missing)}. Pass these sizes as well.")
    return Transformer(**model)
