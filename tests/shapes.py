"""The params of published models as trees of shapes, from their configs: {path: shape}, with biases, norms and all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Tree = dict[str, Any]


def dense(n_in: int, n_out: int, bias: bool = True) -> Tree:
    return {"kernel": (n_in, n_out), **({"bias": (n_out,)} if bias else {})}


def conv(size: int, n_in: int, n_out: int, bias: bool = True) -> Tree:
    return {"kernel": (size, size, n_in, n_out), **({"bias": (n_out,)} if bias else {})}


def norm(n: int, bias: bool = True) -> Tree:
    return {"scale": (n,), **({"bias": (n,)} if bias else {})}


def layers(count: int, layer: Tree, scan: bool = False) -> Tree:
    """One subtree per layer, or one with a leading dim for a scan."""
    if not scan:
        return {f"layer_{i}": layer for i in range(count)}
    return {"layers": stacked(count, layer)}


def stacked(count: int, tree: Tree) -> Tree:
    return {k: stacked(count, v) if isinstance(v, dict) else (count, *v) for k, v in tree.items()}


def gpt2(d: int, count: int, scan: bool = False) -> Tree:
    block = {
        "ln_1": norm(d), "attn": dense(d, 3 * d), "proj": dense(d, d),
        "ln_2": norm(d), "up": dense(d, 4 * d), "down": dense(4 * d, d),
    }  # fmt: skip
    return {"wte": (50257, d), "wpe": (1024, d), "h": layers(count, block, scan), "ln_f": norm(d)}


def llama3(d: int, count: int, hidden: int, scan: bool = False) -> Tree:
    kv = 1024
    block = {
        "q": (d, d), "k": (d, kv), "v": (d, kv), "o": (d, d), "gate": (d, hidden), "up": (d, hidden),
        "down": (hidden, d), "norm_1": (d,), "norm_2": (d,),
    }  # fmt: skip
    vocab = 128256
    return {"embed": (vocab, d), "h": layers(count, block, scan), "norm": (d,), "head": (d, vocab)}


def gemma2_9b() -> Tree:
    d, heads, kv, hidden = 3584, 16 * 256, 8 * 256, 14336
    block = {
        "q": (d, heads), "k": (d, kv), "v": (d, kv), "o": (heads, d), "gate": (d, hidden), "up": (d, hidden),
        "down": (hidden, d), **{f"norm_{i}": (d,) for i in range(4)},
    }  # fmt: skip
    return {"embed": (256000, d), "h": layers(42, block), "norm": (d,)}


def mixtral_8x7b() -> Tree:
    d, kv, hidden, experts = 4096, 1024, 14336, 8
    block = {
        "q": (d, d), "k": (d, kv), "v": (d, kv), "o": (d, d), "router": (d, experts), "norm_1": (d,), "norm_2": (d,),
        "gate": (experts, d, hidden), "up": (experts, d, hidden), "down": (experts, hidden, d),
    }  # fmt: skip
    return {"embed": (32000, d), "h": layers(32, block), "norm": (d,), "head": (d, 32000)}


def t5_11b() -> Tree:
    d, heads, width, hidden = 1024, 128, 128 * 128, 65536
    attention = {"q": (d, width), "k": (d, width), "v": (d, width), "o": (width, d), "norm": (d,)}
    mlp = {"wi": (d, hidden), "wo": (hidden, d), "norm": (d,)}
    encoder = {"self": attention, "mlp": mlp}
    decoder = {"self": attention, "cross": attention, "mlp": mlp}
    sides = {"encoder": layers(24, encoder), "decoder": layers(24, decoder)}
    tables = {f"{side}_{name}": s for side in sides for name, s in (("bias", (32, heads)), ("norm", (d,)))}
    return {"embed": (32128, d), **sides, **tables}


def whisper_large() -> Tree:
    d = 1280
    attention = {
        "q": dense(d, d),
        "k": dense(d, d, bias=False),
        "v": dense(d, d),
        "o": dense(d, d),
        "norm": norm(d),
    }
    mlp = {"up": dense(d, 4 * d), "down": dense(4 * d, d), "norm": norm(d)}
    return {
        "conv_1": {"kernel": (3, 80, d), "bias": (d,)}, "conv_2": {"kernel": (3, d, d), "bias": (d,)},
        "encoder": layers(32, {"self": attention, "mlp": mlp}), "encoder_norm": norm(d),
        "embed": (51865, d), "positions": (448, d),
        "decoder": layers(32, {"self": attention, "cross": attention, "mlp": mlp}), "decoder_norm": norm(d),
    }  # fmt: skip


def vit_h14() -> Tree:
    d = 1280
    block = {
        "norm_1": norm(d), "qkv": dense(d, 3 * d), "out": dense(d, d),
        "norm_2": norm(d), "up": dense(d, 4 * d), "down": dense(4 * d, d),
    }  # fmt: skip
    ends = {
        "patch": conv(14, 3, d),
        "cls": (1, 1, d),
        "positions": (1, 257, d),
        "norm": norm(d),
        "head": dense(d, 1000),
    }
    return {**ends, "h": layers(32, block)}


def resnet50() -> Tree:
    tree: Tree = {"stem": conv(7, 3, 64, bias=False), "stem_norm": norm(64), "head": dense(2048, 1000)}
    n_in = 64
    for stage, (count, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
        for i in range(count):
            out = 4 * width
            block = {
                "conv_1": conv(1, n_in, width, bias=False), "norm_1": norm(width),
                "conv_2": conv(3, width, width, bias=False), "norm_2": norm(width),
                "conv_3": conv(1, width, out, bias=False), "norm_3": norm(out),
            }  # fmt: skip
            if i == 0:
                block |= {"short": conv(1, n_in, out, bias=False), "short_norm": norm(out)}
            tree[f"block_{stage}_{i}"], n_in = block, out
    return tree


def sdxl_unet() -> Tree:
    """The U-Net of Stable Diffusion XL: 320, 640, 1280 channels, transformers of depth 0, 2, 10."""
    time, context = 1280, 2048

    def resnet(n_in: int, n_out: int) -> Tree:
        block = {
            "norm_1": norm(n_in), "conv_1": conv(3, n_in, n_out), "time": dense(time, n_out),
            "norm_2": norm(n_out), "conv_2": conv(3, n_out, n_out),
        }  # fmt: skip
        return block if n_in == n_out else {**block, "short": conv(1, n_in, n_out)}

    def transformer(c: int, depth: int) -> Tree:
        def attention(n: int) -> Tree:
            return {"q": (c, c), "k": (n, c), "v": (n, c), "out": dense(c, c)}

        block = {
            **{f"norm_{i}": norm(c) for i in range(3)}, "self": attention(c), "cross": attention(context),
            "up": dense(c, 8 * c), "down": dense(4 * c, c),
        }  # fmt: skip
        return {"norm": norm(c), "in": dense(c, c), "out": dense(c, c), "h": layers(depth, block)}

    widths, depths = (320, 640, 1280), (0, 2, 10)
    tree: Tree = {"conv_in": conv(3, 4, 320), "norm_out": norm(320), "conv_out": conv(3, 320, 4)}
    for name, n_in in (("time", 320), ("add", 2816)):
        tree[name] = {"up": dense(n_in, time), "down": dense(time, time)}
    skips, c = [320], 320
    for level, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        for i in range(2):
            tree[f"down_{level}_{i}"] = {"resnet": resnet(c, width)}
            if depth:
                tree[f"down_{level}_{i}"]["transformer"] = transformer(width, depth)
            c = width
            skips.append(c)
        if level < 2:
            tree[f"down_{level}"] = conv(3, c, c)
            skips.append(c)
    tree["mid"] = {"a": resnet(c, c), "transformer": transformer(c, 10), "b": resnet(c, c)}
    for level, (width, depth) in reversed(list(enumerate(zip(widths, depths, strict=True)))):
        for i in range(3):
            tree[f"up_{level}_{i}"] = {"resnet": resnet(c + skips.pop(), width)}
            if depth:
                tree[f"up_{level}_{i}"]["transformer"] = transformer(width, depth)
            c = width
        if level:
            tree[f"up_{level}"] = conv(3, c, c)
    return tree


MODELS: dict[str, tuple[Callable[[], Tree], int]] = {
    "gpt2": (lambda: gpt2(768, 12), 124_439_808),
    "gpt2-medium": (lambda: gpt2(1024, 24), 354_823_168),
    "gpt2-large": (lambda: gpt2(1280, 36), 774_030_080),
    "gpt2-xl": (lambda: gpt2(1600, 48), 1_557_611_200),
    "gpt2-xl, scan": (lambda: gpt2(1600, 48, scan=True), 1_557_611_200),
    "llama3-8b": (lambda: llama3(4096, 32, 14336), 8_030_261_248),
    "llama3-8b, scan": (lambda: llama3(4096, 32, 14336, scan=True), 8_030_261_248),
    "llama3-70b": (lambda: llama3(8192, 80, 28672), 70_553_706_496),
    "gemma2-9b": (gemma2_9b, 9_241_705_984),
    "mixtral-8x7b": (mixtral_8x7b, 46_702_792_704),
    "t5-11b": (t5_11b, 11_307_321_344),
    "whisper-large": (whisper_large, 1_541_384_960),
    "vit-h14": (vit_h14, 632_045_800),
    "resnet50": (resnet50, 25_557_032),
    "sdxl-unet": (sdxl_unet, 2_567_463_684),
}
"""A model's shapes, and how many params are published for it."""
