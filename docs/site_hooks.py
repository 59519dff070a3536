"""What `mkdocs build` does to the pages (mkdocs.yml names this file); GitHub shows them without it.

- A link to a file outside of docs/ goes to the repository where `repo_url` is set, else it becomes the file's name.
- Comments that are for tests/docs/test_docs.py (`<!-- setup`, `<!-- not run: ...`) are left out.
- `<!-- notes -->` becomes the notes of jzero/: see `notes`. `<!-- keys -->` becomes the table of deepspeed_keys.py.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[([^\]\n]*)\]\(([^)\s]+)\)")
COMMENT = re.compile(r"^<!-- (?:setup|not run:|needs:|prints).*?-->\n", re.DOTALL | re.MULTILINE)
FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
NOTE = re.compile(r"^\[Note: ([^\]]+)\]\s*?\n(.*?)(?=^\[Note: |\Z)", re.DOTALL | re.MULTILINE)
PLACE, KEYS = "<!-- notes -->", "<!-- keys -->"
REFERENCE = re.compile(r"`?\[Note: ([^\]`]+)\]`?")


def on_page_markdown(markdown: str, page, config, **_) -> str:
    """The page as the site shows it."""
    parts = FENCE.split(COMMENT.sub("", markdown))
    parts[::2] = [links(spaced(text), page.file.src_uri, config.repo_url or "") for text in parts[::2]]
    text = "".join(parts)
    text = text.replace(KEYS, keys()) if KEYS in text else text
    return text.replace(PLACE, notes()) if PLACE in text else text


def links(text: str, page: str, repo_url: str) -> str:
    """The text with its links to files outside of docs/ replaced.

    Args:
      text: Markdown without fenced code.
      page: its path in docs/.
      repo_url: of the repository, or empty.

    Raises:
      ValueError: a link names a file that is not there.
    """

    def replaced(match: re.Match) -> str:
        label, target = match.groups()
        path, _, anchor = target.partition("#")
        if not path or re.match(r"\w+:", path):
            return match[0]
        inside = os.path.normpath(Path("docs", page).parent / path)
        if inside.split(os.sep)[0] == "docs":
            return match[0]
        if not (ROOT / inside).exists():
            raise ValueError(f"docs/{page}: the link to {target} leads to {inside}, which does not exist.")
        if repo_url:
            return f"[{label}]({repo_url.rstrip('/')}/blob/main/{inside}{'#' * bool(anchor)}{anchor})"
        return label if label.strip("`") == inside else f"{label} (`{inside}`)"

    return LINK.sub(replaced, text)


def keys() -> str:
    """What becomes of every key of a DeepSpeed config."""
    sys.path[:0] = [str(ROOT), str(ROOT / "docs")]
    try:
        from deepspeed_keys import table
    finally:
        del sys.path[:2]
    return table()


def found_notes(root: Path = ROOT) -> dict[str, list[tuple[str, str]]]:
    """Every note in the docstrings of jzero's modules: {module's path: [(title, text), ...]}."""
    found = {}
    for path in sorted((root / "jzero").rglob("*.py")):
        doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        if rows := [(title, text.strip()) for title, text in NOTE.findall(doc)]:
            found[path.relative_to(root).as_posix()] = rows
    return found


def notes(root: Path = ROOT) -> str:
    """The notes as Markdown: one heading for each file and each note, references between them as links."""
    found = found_notes(root)
    anchors = {title: anchor(path, title) for path, rows in found.items() for title, _ in rows}

    def linked(text: str) -> str:
        def one(m: re.Match) -> str:
            title = " ".join(m[1].split())
            return f"[{title}](#{anchors[title]})" if title in anchors else title

        return REFERENCE.sub(one, text)

    lines = []
    for path, rows in found.items():
        lines += [f"## {path}", ""]
        for title, text in rows:
            body = textwrap.dedent(text)
            lines += [f"### {title} {{ #{anchor(path, title)} }}", "", linked(spaced(body)), ""]
    return "\n".join(lines)


def spaced(text: str) -> str:
    """Markdown with a blank line before each list: Python-Markdown needs it, GitHub does not."""
    return re.sub(r"(?m)^((?!- |\s).+)\n(?=- )", r"\1\n\n", text)


def anchor(path: str, title: str) -> str:
    return re.sub(r"\W+", "-", f"note {Path(path).stem} {title}".lower()).strip("-")
