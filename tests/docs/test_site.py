"""The docs as a site: it builds strictly, fetches nothing when it is read, and leaves nothing out."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from html import unescape

import pages
import pytest
from scripts import DOCS, load

import jzero
from jzero.deepspeed.keys import KEYS

hooks = load("site_hooks")
architecture = load("make_architecture")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="the site needs jzero[docs]")
    pytest.importorskip("mkdocstrings", reason="the site needs jzero[docs]")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=pages.ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert not done.returncode, done.stderr[-3000:]
    return folder


@pytest.mark.nightly
def test_every_page_is_in_the_site_and_no_script(site):
    there = {p.relative_to(site).with_suffix(".md").as_posix() for p in site.rglob("*.html")}
    assert {p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md")} <= there
    assert not list(site.rglob("*.py"))
    assert (site / "launch" / "slurm.sbatch").is_file()


def test_every_page_is_in_the_navigation():
    nav = (pages.ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert not [p.name for p in DOCS.glob("*.md") if f" {p.name}\n" not in nav]


def test_the_readme_links_every_page():
    text = (pages.ROOT / "README.md").read_text(encoding="utf-8")
    assert not [p.name for p in DOCS.glob("*.md") if f"](docs/{p.name}" not in text]


def test_the_architecture_page_is_short_and_names_every_package():
    page = (DOCS / "design.md").read_text(encoding="utf-8")
    assert len(page.split()) <= 1200
    packages = page.split("## The packages")[1].split("\n## ")[0]
    listed = re.findall(r"(?m)^\| `([\w.]+)/?` \| ", packages)
    names = [name for row in architecture.layers() for name in row]
    assert [x.removesuffix(".py") for x in listed] == names
    assert set(architecture.PURPOSE) == set(names)
    assert not [x for x in listed if not (pages.ROOT / "jzero" / x).exists()]


def test_the_picture_has_the_layers_and_the_ways():
    picture = (DOCS / "pictures" / "architecture.svg").read_text(encoding="utf-8")
    shown = [unescape(t) for t in re.findall(r"<t(?:ext|span) [^>]*>([^<]+)</t", picture)]
    names = [name for row in architecture.layers() for name in row]
    titles = [x for x in shown if re.sub(r"/$|\.py$", "", x) in names][: len(names)]
    assert [re.sub(r"/$|\.py$", "", x) for x in titles] == names, "run: python docs/make_architecture.py"
    lines = [line for steps in architecture.WAYS.values() for step in steps for line in step.split("\n")]
    missing = [x for x in (*architecture.PURPOSE.values(), *lines) if x not in shown]
    assert not missing, "run: python docs/make_architecture.py"


@pytest.mark.nightly
def test_nothing_is_fetched_from_elsewhere(site):
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        loaded = re.findall(
            r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?((?:https?:)?//[^\s\">]+)", text
        )
        assert not loaded, (path.name, loaded)
    for path in site.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", path.read_text(encoding="utf-8")), (
            path.name
        )


@pytest.mark.nightly
def test_comments_for_the_tests_are_not_shown(site):
    text = "".join(p.read_text(encoding="utf-8") for p in site.glob("*.html"))
    assert not re.search(r"<!-- (setup|not run|needs|prints|notes)", text)


def test_every_public_name_is_in_the_api(site):
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^::: jzero\.([\w.]+)$", page, re.MULTILINE)
    assert sorted(x.split(".")[-1] for x in listed) == sorted(jzero.__all__)
    for name in listed:  # where a module has the name of its function, the function is meant
        module = importlib.util.find_spec(f"jzero.{name.split('.')[0]}")
        assert ("." in name) == (module is not None) or name in ("checkpoint", "deepspeed"), name
    html = (site / "api.html").read_text(encoding="utf-8")
    shown = re.findall(r"^::: jzero\.(\w+)\n    options:\n      members: \[(.*?)\]$", page, re.MULTILINE)
    members = {name: set(names.split(", ")) for name, names in shown}
    assert members["checkpoint"] <= set(jzero.checkpoint.__all__)
    assert set(re.findall(r'id="jzero\.Plan\.(\w+)"', html)) == members["Plan"]  # not what other modules ask a plan
    for name in [*listed, *(f"checkpoint.{x}" for x in jzero.checkpoint.__all__)]:
        assert f'id="jzero.{name}"' in html, name
    assert "&gt;&gt;&gt;" in html  # doctests are code


def test_every_note_is_in_the_site(site):
    sources = sorted((pages.ROOT / "jzero").rglob("*.py"))
    written = [t for p in sources for t in re.findall(r"(?m)^\[Note: (.+)\]$", p.read_text(encoding="utf-8"))]
    assert len(written) > 40
    html = (site / "internals.html").read_text(encoding="utf-8")
    for title in written:
        assert re.search(rf">{re.escape(title)}<a class=\"headerlink\"", html), title
    text = " ".join(re.sub(r"<[^>]+>", "", html).split())
    assert "Two layouts" in text or "two layouts" in text


def test_every_key_of_deepspeed_is_in_the_site(site):
    text = re.sub(r"<[^>]+>", "", (site / "from_deepspeed.html").read_text(encoding="utf-8"))
    assert [name for name in KEYS if name.rpartition(".")[2] not in text] == []


def test_links_to_files_outside_of_docs():
    text = (
        "See [the wire](../jzero/proof/network.py#L3), [design](design.md) and [JAX](https://docs.jax.dev)."
    )
    kept = "[design](design.md) and [JAX](https://docs.jax.dev)."
    assert hooks.links(text, "plan.md", "") == f"See the wire (`jzero/proof/network.py`), {kept}"
    there = "https://example.org/x/blob/main/jzero/proof/network.py#L3"
    assert hooks.links(text, "plan.md", "https://example.org/x/") == f"See [the wire]({there}), {kept}"
    with pytest.raises(ValueError, match="does not exist"):
        hooks.links("[x](../jzero/nowhere.py)", "plan.md", "")


def test_a_list_is_told_from_a_paragraph():
    assert hooks.spaced("A:\n- b\n  c\n- d\n") == "A:\n\n- b\n  c\n- d\n"
