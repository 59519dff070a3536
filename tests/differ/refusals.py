"""The documented refusals: a case that ends in one of them has passed, anything else that is raised is a failure."""

from __future__ import annotations

import re

REFUSALS = {
    "offload under an Explicit mesh": r"Explicit.*(offload|Auto)|offload.*Explicit",
    "an Explicit mesh and leaves split along several dims": r"several dims.*Auto|Auto.*several dims",
    "an optimizer that trains nothing": r"leaves every param as it is",
    "an optimizer state that is made of frozen params too": r"computes it from frozen ones too",
    "a unit of state larger than a quarter of the disk buffer": r"units? (is|are) larger than a quarter of the buffer",
    "8-bit moments of an optimizer that has none": r"has no moments",
    "params on the host, GPUs only": r"needs? jaxlib|Use jaxlib",
}


SORTS = {"XLA's all-to-all of a sort": r"HLO all-to-all has operands with different shapes"}
"""Those of XLA, where an update sorts a leaf (docs/limits.md)."""

CLOSED_OVER = {"micro-batches that would draw the same numbers": r"key that is the same for all parts of the batch"}
"""Those of a linen loss that draws from a key that it closes over (an NNX module brings its own)."""

EAGER = {"gradients of padded leaves outside of jit": r"implies that array axis \d+ is partitioned"}
"""Those of steps that are not jitted."""


def refusal(error: BaseException, case: dict) -> str | None:
    """The name of the refusal that an error is; None for any other error."""
    known = REFUSALS | (EAGER if case["step"] == "eager" else {}) | (CLOSED_OVER if case["flavour"] == "linen" else {})
    text = re.sub(r"\s+", " ", str(error))
    if not isinstance(error, (ValueError, TypeError, NotImplementedError)):
        known = SORTS if "median" in case["wraps"] and isinstance(error, RuntimeError) else {}
    return next((name for name, pattern in known.items() if re.search(pattern, text)), None)
