"""What becomes of every key of a DeepSpeed config, as Markdown, from jzero/deepspeed/keys.toml.

    python docs/deepspeed_keys.py

The site shows it on the page from_deepspeed.md (site_hooks.py).
"""

from __future__ import annotations

import re

from jzero.deepspeed.keys import ALIASES, KEYS

LINK = re.compile(r"docs/(\w+\.md)")


def table() -> str:
    """A row per key; keys of one section with the same fate and the same text share a row. Pages are links."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for name, key in KEYS.items():
        section, _, last = name.rpartition(".")
        others = [
            a.rpartition(".")[2] for a, k in ALIASES.items() if k == name and a.rpartition(".")[0] == section
        ]
        fate = key.fate + " where false" * any(off is True for off in key["off"])
        rows.setdefault((section, fate, key.text), []).append(
            f"`{last}`" + (f" (`{'`, `'.join(others)}`)" if others else "")
        )
    order = list(dict.fromkeys(section for section, _, _ in rows))
    lines = []
    for section in order:
        lines += [f"\n`{section}`\n" if section else "\nTop level\n", "| key | becomes |", "|---|---|"]
        for (of, fate, text), names in rows.items():
            if of == section:
                said = ("" if fate == "mapped" else f"*{fate}*: ") + LINK.sub(r"[\g<0>](\1)", text)
                lines.append(f"| {', '.join(names)} | {said} |")
    return "\n".join(lines) + "\n\n"


if __name__ == "__main__":
    print(table())
