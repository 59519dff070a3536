"""Which devices a collective joins: three notations of replica groups in HLO text, and the mesh axes in them.

[Note: device numbers]
The numbers in a group are positions in the program's device assignment, and jax builds that from the mesh
of the arguments, in the order of `mesh.devices.flat` (it refuses a program with meshes of different order).
So a number is a coordinate of the mesh, and the axes of a group are those along which its coordinates vary.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping

import numpy as np

from jzero.core.errors import ProofError

Groups = tuple[tuple[int, ...], ...]

_BRACES = r"\{(?:[^{}]|\{[^{}]*\})*\}"
_IOTA = r"\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
_MESH = r"mesh\[[^\]]*\](?:,\s*device_ids=\((?:[^()]|\([^()]*\))*\))?\s*\{[^}]*\}"
_END = r"(?=[,\s]|$)"  # what goes on is another notation
GROUPS = re.compile(rf"replica_groups=({_BRACES}|{_IOTA}|{_MESH}){_END}")
PAIRS = re.compile(rf"source_target_pairs=({_BRACES}){_END}")


def _listed(item: str) -> str:
    return rf"(?:{item}(?:,\s*{item})*)?"


_LIST = re.compile(r"\{" + _listed(r"\{[\d,\s]*\}") + r"\}")
_PAIR_LIST = re.compile(r"\{" + _listed(r"\{\d+,\s*\d+\}") + r"\}")
_SIZES, _AXES = _listed(r"'[^']*'=\d+"), _listed(r"'[^']*'(?::\(\d+\)\d+)?")
_MESH_AXES = re.compile(rf"mesh\[{_SIZES}\][^{{]*\{{{_AXES}\}}")
_ORDER = re.compile(r"(?:devices=)?(?:(?:\[[\d,]+\]<=)?\[[\d,]+\](?:T\([\d,\s]+\))?|(?:\[[\d,]+\])?[\d,\s]+)")


@functools.lru_cache(maxsize=1024)
def parse_groups(notation: str, devices: int) -> Groups:
    """The groups that a `replica_groups` attribute names, as tuples of device numbers.

    Args:
      notation: a list `{{0,1},{2,3}}`, an iota `[2,4]<=[4,2]T(1,0)`, or mesh axes
        `mesh['data'=4,'model'=2] {'data'}`, with sub-axes `'data':(1)2`. `{}` means all devices.
      devices: number of devices of the program.

    Returns:
      One tuple per group.

    Raises:
      ProofError: another notation than these three.

    Example:
      >>> parse_groups("[2,2]<=[2,2]T(1,0)", 4)
      ((0, 2), (1, 3))
      >>> parse_groups("mesh['a'=2,'b'=2] {'b'}", 4)
      ((0, 1), (2, 3))
    """
    if _MESH_AXES.fullmatch(notation):
        return _rows(_mesh_groups(notation))
    if notation.startswith("["):
        shape, order = notation.split("<=")
        try:
            return _rows(_iota(order).reshape(_numbers(shape)))
        except ValueError as error:  # of another rank or size
            raise ProofError(f"an unknown notation of replica groups: {notation[:80]!r}") from error
    if _LIST.fullmatch(notation):
        groups = tuple(_numbers(group) for group in re.findall(r"\{([\d,\s]+)\}", notation))
        return groups or (tuple(range(devices)),)
    raise ProofError(f"an unknown notation of replica groups: {notation[:80]!r}")


@functools.lru_cache(maxsize=1024)
def parse_pairs(notation: str) -> Groups:
    """The (source, target) pairs of a collective-permute, from a list `{{0,1},{1,0}}`.

    Raises:
      ProofError: another notation.
    """
    if not _PAIR_LIST.fullmatch(notation):
        raise ProofError(f"an unknown notation of source and target pairs: {notation[:80]!r}")
    return tuple(_numbers(pair) for pair in re.findall(r"\{([\d,\s]+)\}", notation))


def axes_of(groups: Groups, mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the members of a group differ, in the order of the mesh.

    Empty if the mesh has another number of devices than the program.

    Example:
      >>> axes_of(((0, 2), (1, 3)), {"data": 2, "model": 2})
      ('data',)
    """
    sizes = tuple(mesh_shape.values())
    if not groups or max(map(max, groups)) >= math.prod(sizes):
        return ()
    differ = np.zeros(len(sizes), bool)
    for group in groups:
        coordinates = np.stack(np.unravel_index(np.array(group), sizes), axis=1)
        differ |= (coordinates != coordinates[0]).any(axis=0)
        if differ.all():
            break
    return tuple(name for name, d in zip(mesh_shape, differ, strict=True) if d)


def _mesh_groups(notation: str) -> np.ndarray:
    """Groups from mesh axes: bring the named (sub-)axes to the end, one group per row."""
    mesh, axes = notation.rsplit("{", 1)
    names = re.findall(r"'([^']*)'=(\d+)", mesh.split("]", 1)[0])
    sizes = {name: int(size) for name, size in names}
    ids = re.search(r"device_ids=\((.*)\)", mesh)
    every = np.arange(math.prod(sizes.values()))
    try:
        grid = _device_ids(ids[1]) if ids else every
    except ValueError:  # of a transposition of another rank
        grid = np.array([])
    if not np.array_equal(np.sort(grid), every):
        raise ProofError(f"an unknown notation of a mesh's devices: {notation[:120]!r}")
    taken = [(name, _numbers(sub)) for name, sub in re.findall(r"'([^']*)'(:\(\d+\)\d+)?", axes)]
    dims, last = _split_axes(sizes, taken)
    rest = [i for i in range(len(dims)) if i not in last]
    count = math.prod(dims[i] for i in last)
    return grid.reshape(dims).transpose(rest + last).reshape(-1, count)


def _split_axes(sizes: dict[str, int], taken) -> tuple[list[int], list[int]]:
    """Sizes of the mesh with sub-axes apart, and the positions of those that `taken` names, in its order.

    A sub-axis `(pre)size` is a slice of an axis: `pre` is the product of the sizes before it.
    """
    dims: list[int] = []
    position: dict[tuple[str, int], int] = {}
    for name, size in sizes.items():
        done = 1
        for pre, part in sorted(sub or (1, size) for other, sub in taken if other == name):
            dims += [pre // done] if pre > done else []
            position[name, pre] = len(dims)
            dims.append(part)
            done = pre * part
        dims += [size // done] if done < size or done == 1 else []
    return dims, [position[name, (sub or (1,))[0]] for name, sub in taken]


def _device_ids(text: str) -> np.ndarray:
    """A device order inside a mesh: an iota as elsewhere, or the numbers; empty (or a ValueError) for another."""
    if not _ORDER.fullmatch(text):
        return np.array([])
    text = text.removeprefix("devices=")
    if "<=" in text:
        return _iota(text.split("<=", 1)[1])
    if "T(" in text:
        return _iota(text)
    return np.array(_numbers(text.rsplit("]", 1)[-1]))


def _iota(text: str) -> np.ndarray:
    """`[4,2]T(1,0)`: 0..7 as a 4 x 2 array, transposed, flat."""
    dims, _, perm = text.partition("T")
    array = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return (array.transpose(_numbers(perm)) if perm else array).reshape(-1)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))


def _rows(array: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in array.tolist())
