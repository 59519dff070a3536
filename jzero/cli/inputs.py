"""What a command line names: functions (`module:function`), batches (`tokens=int32[64,129]`), mesh axes."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from jzero.core.errors import SHORT_DTYPES, nearest

Leaf = jax.ShapeDtypeStruct
_LEAF = re.compile(r"(?:(?P<name>\w+)\s*=\s*)?(?P<dtype>[a-z]\w*)\s*\[(?P<shape>[\d\s,]*)\]")
_LONG_DTYPES = {short: name for name, short in SHORT_DTYPES.items()}
_EXAMPLE = '"tokens=int32[1024,1025]", several as "x=float32[64,32,32,3], y=int32[64]"'


class InputError(ValueError):
    """The command line cannot use what it was given; the text is all that a user needs to see."""


def load_function(target: str, flag: str) -> Callable[..., Any]:
    """The function that `module:function` or `path/to/file.py:function` names.

    Raises:
      InputError: there is no such module, file or function, or it cannot be called.
    """
    where, _, name = target.partition(":")
    if not where or not name:
        raise InputError(f"{flag} {target}: write module:function, as in {flag} train.gpt:create_state.")
    module = _load_file(Path(where), flag) if where.endswith(".py") else _load_module(where, flag)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            known = [k for k in dir(found) if not k.startswith("_")]
            raise InputError(f"{flag} {target}: {where} has no {part!r}.{nearest(part, known)}")
        found = getattr(found, part)
    if not callable(found):
        raise InputError(f"{flag} {target}: a {type(found).__name__} cannot be called.")
    return found


def _load_module(name: str, flag: str) -> ModuleType:
    _can_import_from(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name + ".").startswith(error.name + "."):
            raise  # the module is there; what it imports is not
        raise InputError(
            f"{flag}: no module named {error.name!r} here. Run this from the folder that holds it, or give the "
            f"file: {flag} path/to/file.py:function."
        ) from None


def _load_file(path: Path, flag: str) -> ModuleType:
    if not path.is_file():
        raise InputError(f"{flag}: no file {path}.")
    loaded = (m for m in list(sys.modules.values()) if getattr(m, "__file__", None) == str(path.resolve()))
    if (there := next(loaded, None)) is not None:
        return there  # both --create and --step name it
    name = path.stem if path.stem not in sys.modules else f"{path.stem} of {flag}"  # their jax.py is not jax
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _can_import_from(path.parent)  # modules in the same folder can be imported
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _can_import_from(folder: Path) -> None:
    """Adds a folder of the user after everything else, so that no file in it shadows an installed module."""
    if str(folder.resolve()) not in sys.path:
        sys.path.append(str(folder.resolve()))


def check_creator(create: Callable[..., Any], target: str) -> None:
    """Raises InputError if the creation function needs arguments."""
    needed = _needed(create)
    if needed:
        raise InputError(
            f"--create {target}: it needs {', '.join(needed)}; a creation function is called without arguments. "
            "Write one that calls it: def create(): return ..."
        )


def check_step(step: Callable[..., Any], target: str, args: list[str]) -> None:
    """Raises InputError if the step cannot take the state first and then the batch; `args` are their names."""
    try:
        inspect.signature(step).bind(*args)
    except ValueError:  # no signature to be had
        return
    except TypeError:
        raise InputError(
            f"--step {target}: {signature(step)} cannot be called with ({', '.join(args)}). A step takes the "
            "state first (NNX: the model, then the optimizer), then what --batch describes."
        ) from None


def signature(fn: Callable[..., Any]) -> str:
    """`train_step(state, batch)`, for messages."""
    try:
        text = ", ".join(inspect.signature(fn).parameters)
    except ValueError:
        text = "..."
    return f"{getattr(fn, '__name__', 'the step')}({text})"


def _needed(fn: Callable[..., Any]) -> list[str]:
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    kinds = (*plain, inspect.Parameter.KEYWORD_ONLY)
    try:
        params = inspect.signature(fn).parameters.values()
    except ValueError:
        return []
    return [p.name for p in params if p.default is p.empty and p.kind in kinds]


def names_function(text: str) -> bool:
    """True for a `--batch` that is `module:function`, and does not describe arrays."""
    return ":" in text and not set(text) & set("[=")


def parse_batch(text: str) -> list[Leaf | dict[str, Leaf]]:
    """The arguments that follow the state: named leaves together as one dict, others each by itself.

    Args:
      text: `tokens=int32[1024,1025]`, comma or space between leaves; a dtype by its long or its short name
        (`i32`); `key[]` is a random key.

    Returns:
      `jax.ShapeDtypeStruct` leaves without shardings.

    Raises:
      InputError: the text has another form, or names an unknown dtype.

    Example:
      >>> {name: x.shape for name, x in parse_batch("x=f32[8,3], y=int32[8]")[0].items()}
      {'x': (8, 3), 'y': (8,)}
    """
    args: list[Leaf | dict[str, Leaf]] = []
    named: dict[str, Leaf] = {}
    position = 0
    for leaf in _LEAF.finditer(text):
        if text[position : leaf.start()].strip(", \t\n"):
            break
        position = leaf.end()
        value = _leaf(leaf["dtype"], leaf["shape"], text)
        if leaf["name"] is None:
            args.append(value)
        elif not named:
            args.append(named)
        if leaf["name"] is not None:
            if leaf["name"] in named:
                raise InputError(f"--batch {text!r}: {leaf['name']!r} is named twice.")
            named[leaf["name"]] = value
    if not args or text[position:].strip(", \t\n"):
        rest = text[position:].strip(", ") or text
        if round_ := re.search(r"=?\s*[a-z]\w*\s*\(([\d\s,]*)\)", rest):
            better = text.replace("(", "[").replace(")", "]")
            raise InputError(
                f"--batch {text!r}: a shape goes in square brackets: [{round_[1]}]. Write --batch {better!r}."
            )
        raise InputError(
            f"--batch: cannot read {rest!r}. Write name=dtype[shape], as in {_EXAMPLE}, or module:function."
        )
    return args


def _leaf(dtype: str, shape: str, text: str) -> Leaf:
    sizes = [s.strip() for s in shape.split(",") if s.strip()]
    if any(not s.isdecimal() for s in sizes):
        raise InputError(f"--batch {text!r}: [{shape}] is not a shape. Write {_EXAMPLE}.")
    dims = tuple(map(int, sizes))
    if dtype == "key":
        return jax.ShapeDtypeStruct(dims, jax.eval_shape(lambda: jax.random.key(0)).dtype)
    try:
        return jax.ShapeDtypeStruct(dims, jnp.dtype(_LONG_DTYPES.get(dtype, dtype)))
    except TypeError:
        known = [*SHORT_DTYPES, *_LONG_DTYPES]
        raise InputError(f"--batch {text!r}: unknown dtype {dtype!r}.{nearest(dtype, known)}") from None


def parse_axes(text: str | None, flag: str) -> dict[str, int] | None:
    """`replica=8,data=8` as a dict of sizes by axis name; None stays None.

    Raises:
      InputError: it is written otherwise, or names an axis twice.
    """
    if text is None:
        return None
    pairs = [part.partition("=") for part in re.split(r"[,\s]+", text.strip(", ")) if part]
    if not pairs or any(not name.isidentifier() or not size.isdecimal() for name, _, size in pairs):
        raise InputError(f"{flag} {text!r}: write axis=size, as in {flag} replica=8,data=8.")
    if len({name for name, _, _ in pairs}) < len(pairs):
        raise InputError(f"{flag} {text!r}: an axis is named twice.")
    return {name: int(size) for name, _, size in pairs}


def parse_names(text: str | None) -> str | tuple[str, ...] | None:
    """`data` or `replica,data` as a name or a tuple of names; None stays None."""
    names = tuple(part.strip() for part in text.split(",") if part.strip()) if text else ()
    return names[0] if len(names) == 1 else names or None


def parse_stages(text: str) -> list[int]:
    """`0,1,2,3` as sorted integers without repeats.

    Raises:
      InputError: there is no stage, or something is not one.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    bad = [part for part in parts if part not in ("0", "1", "2", "3")]
    if bad or not parts:
        raise InputError(
            f"--stages {text!r}: {', '.join(bad) or 'nothing'} is not a stage. Write --stages 0,1,2,3."
        )
    return sorted({int(part) for part in parts})


UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def parse_bytes(text: str, flag: str) -> int:
    """`72GB` in bytes.

    Raises:
      InputError: it is not a number above 0 with a unit.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if found is None or found[2] not in UNITS or float(found[1]) <= 0:
        raise InputError(f"{flag} {text!r}: write a number and a unit, as in {flag} 72GB ({', '.join(UNITS)}).")
    return round(float(found[1]) * UNITS[found[2]])


def check_file(path: Path, flag: str, *endings: str) -> None:
    """Raises InputError if a flag's file cannot be written; checked before anything is compiled."""
    if path.suffix not in endings:
        *others, last = endings
        said = f"{', '.join(others)} or {last}" if others else last
        raise InputError(f"{flag} {path}: the name must end in {said}.")
    if not path.resolve().parent.is_dir():
        raise InputError(f"{flag} {path}: there is no folder {path.resolve().parent}.")
