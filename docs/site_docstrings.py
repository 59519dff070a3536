"""How the API page reads jzero's docstrings: griffe knows a section of doctests as "Examples", not as "Example"."""

from __future__ import annotations

import re

import griffe


class OneExample(griffe.Extension):
    """Doctests under `Example:` are shown as code."""

    def on_object(self, *, obj: griffe.Object, **_) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r"(?m)^Example:$", "Examples:", obj.docstring.value)
