"""The GPT of model.py in torch, trained by FSDP2 or DeepSpeed: prints the seconds of each step as JSON.

Started by rate.py, one process for every GPU, with the sizes as JSON in its argument. Dtypes are what each
engine's users have: fp32 params with bf16 compute under FSDP2, bf16 params with fp32 masters under DeepSpeed.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper


class Block(nn.Module):
    """Causal attention and an MLP."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x):
        rows, seq, _ = x.shape
        q, k, v = (
            t.view(rows, seq, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """i64[rows, seq] -> the mean loss against the targets."""

    def __init__(self, c: dict):
        super().__init__()
        self.embed, self.positions = nn.Embedding(c["vocab"], c["dim"]), nn.Embedding(c["seq"], c["dim"])
        self.blocks = nn.ModuleList(
            checkpoint_wrapper(Block(c["dim"], c["heads"])) for _ in range(c["depth"])
        )
        self.norm = nn.LayerNorm(c["dim"])
        for table in (self.embed, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens, targets):
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def adamw(model: Gpt, device: torch.device):
    """As in model.py; clipping is each engine's."""
    return torch.optim.AdamW(model.parameters(), 3e-4, weight_decay=1e-4, fused=device.type == "cuda")


def fsdp2(model: Gpt, c: dict, device: torch.device):
    """A step under FSDP2; stage 2 keeps the gathered weights for the backward pass."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if "compiled" in c["engine"]:
        for block in model.blocks:
            block.compile()
    half = torch.bfloat16
    how = {"mp_policy": MixedPrecisionPolicy(param_dtype=half), "reshard_after_forward": c["stage"] == 3}
    for block in model.blocks:
        fully_shard(block, **how)
    fully_shard(model, **how)
    optimizer = adamw(model, device)

    def step(tokens, targets):
        loss = model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def deepspeed(model: Gpt, c: dict, device: torch.device):
    """A step under DeepSpeed."""
    import deepspeed as engine_of

    config = {
        "train_micro_batch_size_per_gpu": c["rows"], "gradient_clipping": 1.0, "bf16": {"enabled": True},
        "zero_optimization": {"stage": c["stage"]}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    optimizer = adamw(
        model, device
    )  # torch's: DeepSpeed's own is built when it is first used, which takes a minute
    engine = engine_of.initialize(model=model, optimizer=optimizer, config=config)[0]

    def step(tokens, targets):
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def main() -> None:
    c = json.loads(sys.argv[1])
    if c["on_gpu"]:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        wait = functools.partial(torch.cuda.synchronize, device)
    else:
        device, wait = torch.device("cpu"), lambda: None
    dist.init_process_group("nccl" if c["on_gpu"] else "gloo")
    torch.manual_seed(0)
    model = Gpt(c).to(device)
    step = (deepspeed if c["engine"] == "deepspeed" else fsdp2)(model, c, device)
    drawn = torch.randint(c["vocab"], (c["rows"], c["seq"] + 1), device=device)
    tokens, targets = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
    seconds = []
    for _ in range(13 if c["on_gpu"] else 4):
        start = time.perf_counter()
        loss = step(tokens, targets)
        wait()
        seconds.append(time.perf_counter() - start)
    assert torch.isfinite(loss), loss
    if dist.get_rank() == 0:
        print("\nseconds", json.dumps(seconds[3:]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
