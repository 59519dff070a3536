"""Damage to any byte of any file is found before anything is used, and the leaves it is in are named."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding
from layouts import P, assert_same, mesh_of

from jzero import checkpoint
from jzero.checkpoint import CheckpointDamaged, checksums

FLIPS, FLIPS_LONG = 40, 200


def make(seed=0):
    """3 MB of noise, so that the data lies in a file of more than a MiB, and small leaves."""
    rng = np.random.default_rng(seed)
    shapes = {"a": (512, 300), "b": (517, 600), "c": (704, 800), "d": (7,), "e": ()}
    tree = {
        k: jnp.asarray(rng.standard_normal(s), jnp.bfloat16 if k == "c" else jnp.float32)
        for k, s in shapes.items()
    }
    mesh = mesh_of(8)
    return {
        k: jax.device_put(x, NamedSharding(mesh, P("data") if k in "ac" else P())) for k, x in tree.items()
    }


@pytest.fixture(scope="module")
def tree():
    return make()


@pytest.fixture(scope="module")
def whole(tree, tmp_path_factory):
    return checkpoint.save(tmp_path_factory.mktemp("whole") / "5", tree)


@pytest.fixture
def path(whole, tmp_path):
    """A copy to damage."""
    return Path(shutil.copytree(whole, tmp_path / "5"))


def files_of(path):
    return sorted(f for f in path.rglob("*") if f.is_file() and f.stat().st_size)


def is_large(file):
    return file.stat().st_size > 2**20


def chunks(path):
    """The stored bytes of every leaf, read by its name; None where they cannot be."""
    try:
        store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{path / 'state'}/"}).result()
        keys = sorted(store.list().result())
    except Exception:
        return {}
    found = {}
    for key in keys:
        try:
            found[key.decode()] = store.read(key).result().value
        except Exception:
            found[key.decode()] = None
    return found


def damaged_leaves(path, before):
    now = chunks(path)
    return sorted({key.split("/")[0] for key in before if now.get(key, before[key]) != before[key]})


def flip(file, offset, mask):
    with open(file, "r+b") as f:
        f.seek(offset)
        byte = f.read(1)[0]
        f.seek(offset)
        f.write(bytes([byte ^ mask]))


def outcome(run):
    """What it returns, or the damage that it tells; anything else is an error of the test."""
    try:
        return run()
    except CheckpointDamaged as error:
        return error


def flip_and_look(path, tree, seed, count):
    """(detected, harmless) by restore, which does not read all files; `verify` must see every flip."""
    rng, before, seen = random.Random(seed), chunks(path), [0, 0]
    files = files_of(path)
    for i in range(count):
        file = files[i % len(files)] if i % 3 else next(filter(is_large, files))
        offset, mask = rng.randrange(file.stat().st_size), rng.randrange(1, 256)
        name = str(file.relative_to(path))
        flip(file, offset, mask)
        where = f"{name}, byte {offset} ^ {mask}"
        found = outcome(lambda: checkpoint.restore(path, tree))
        if isinstance(found, CheckpointDamaged):
            seen[0] += 1
            assert [d.file for d in found.damage] == [name], where
            if is_large(file):
                assert found.leaves == damaged_leaves(path, before) != [], where
        else:
            seen[1] += 1
            assert_same(found, tree)
        with pytest.raises(CheckpointDamaged, match=name):
            checkpoint.verify(path)
        flip(file, offset, mask)
    assert checkpoint.verify(path) > 2**21
    return seen


def test_flipped_bytes(path, tree):
    assert any(map(is_large, files_of(path)))
    detected, harmless = flip_and_look(path, tree, 0, FLIPS)
    assert detected >= FLIPS * 2 // 3
    assert harmless  # in a note that orbax writes and nobody reads


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 6))
def test_many_flipped_bytes(seed, path, tree):
    detected, _ = flip_and_look(path, tree, seed, FLIPS_LONG)
    assert detected >= FLIPS_LONG * 2 // 3


def test_the_bytes_of_the_small_files(path, tree):
    """One bit in each byte of a manifest, and in many of the rest: `restore` reads the same checksums."""
    for file in files_of(path):
        name = str(file.relative_to(path))
        if is_large(file) or not name.startswith("state/"):
            continue
        for offset in range(0, file.stat().st_size, 1 if name.endswith("ocdbt") else 29):
            flip(file, offset, 1 << (offset % 8))
            with pytest.raises(CheckpointDamaged, match=name):
                checkpoint.verify(path)
            flip(file, offset, 1 << (offset % 8))
    assert_same(checkpoint.restore(path, tree), tree)


def damaged(path, tree, *names):
    """The error of verify, which names these files; that of restore does not need all of them."""
    errors = []
    for run in (lambda: checkpoint.verify(path), lambda: checkpoint.restore(path, tree)):
        with pytest.raises(CheckpointDamaged) as caught:
            run()
        errors.append(caught.value)
    told = [{d.file for d in e.damage} for e in errors]
    assert told[0] == set(names)
    assert set() < told[1] <= told[0]
    return errors[0]


@pytest.mark.parametrize("what", ["shorter", "longer", "emptied", "missing", "zeros"])
def test_each_file_cut_grown_emptied_or_removed(what, path, tree):
    for file in [f for f in files_of(path) if f.is_relative_to(path / "state")]:
        data, name = file.read_bytes(), str(file.relative_to(path))
        new = {"shorter": data[:-1], "longer": data + b"\0", "emptied": b"", "zeros": bytes(len(data))}
        file.write_bytes(new[what]) if what in new else file.unlink()
        error = damaged(path, tree, name)
        if what in ("missing", "zeros"):
            told = {
                "missing": "missing",
                "zeros": "own checksum is wrong" if "checksums" in name else "differs within",
            }
            assert told[what] in str(error)
        if is_large_data(data) and what not in ("shorter", "longer"):  # there nothing of a leaf is lost
            assert set(error.leaves) >= {"a", "b", "c"}
        file.write_bytes(data)
    assert_same(checkpoint.restore(path, tree), tree)


def is_large_data(data):
    return len(data) > 2**20


def test_files_of_two_checkpoints_exchanged(path, tree):
    other = checkpoint.save(path.parent / "4", make(seed=1))
    mine, theirs = (next(filter(is_large, files_of(p))) for p in (path, other))
    name = str(mine.relative_to(path))
    one, two = mine.read_bytes(), theirs.read_bytes()
    mine.write_bytes(two)
    theirs.write_bytes(one)
    error = damaged(path, tree, name)
    assert set(error.leaves) >= {"a", "b", "c"}
    assert error.good is None  # the other one is damaged too
    mine.write_bytes(one)
    theirs.write_bytes(two)
    for a, b in zip(files_of(path / "state"), files_of(other / "state"), strict=True):
        if a.name == b.name and a.read_bytes() != b.read_bytes():  # metadata of another checkpoint
            kept = a.read_bytes()
            a.write_bytes(b.read_bytes())
            if "checksums" in str(a):
                with pytest.raises(CheckpointDamaged):
                    checkpoint.verify(path)
            else:
                damaged(path, tree, str(a.relative_to(path)))
            a.write_bytes(kept)
    assert_same(checkpoint.restore(path, tree), tree)


def test_data_files_of_one_checkpoint_exchanged(path, tree):
    files = [f for f in files_of(path) if f.parent.name == "d"]
    assert len(files) >= 2
    a, b = (f.read_bytes() for f in files[:2])
    files[0].write_bytes(b)
    files[1].write_bytes(a)
    damaged(path, tree, *(str(f.relative_to(path)) for f in files[:2]))


def test_without_its_checksums(path, tree):
    shutil.rmtree(path / "state" / "checksums")
    damaged(path, tree, "state/checksums/0.json")
    with pytest.raises(CheckpointDamaged, match=r"state/checksums/0\.json: missing"):
        checkpoint.custom(path)


@pytest.mark.parametrize(("old", "new"), [("item_handlers", "_tem_handlers"), ("{", "[")])
def test_notes_of_orbax(old, new, path, tree):
    """It writes them beside the data, when that is finished."""
    notes = path / "_CHECKPOINT_METADATA"
    notes.write_text(notes.read_text().replace(old, new, 1))
    damaged(path, tree, "_CHECKPOINT_METADATA")


def test_the_last_good_one_is_named(whole, tmp_path, tree):
    for step in (9, 10, 11, 100):
        shutil.copytree(whole, tmp_path / str(step))
    shutil.copytree(whole, tmp_path / "200.orbax-checkpoint-tmp")  # a save that was killed is none
    for step in (100, 11):
        file = next(filter(is_large, files_of(tmp_path / str(step))))
        flip(file, 12345, 4)
    with pytest.raises(CheckpointDamaged) as caught:
        checkpoint.restore(tmp_path / "100", tree)
    assert caught.value.good == tmp_path / "10"
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{tmp_path / '100'} is damaged, and nothing of it is used:"
    assert "differs within bytes 0 to" in lines[1]
    assert lines[2] == f"Leaves with damaged data: {', '.join(caught.value.leaves)}."
    assert lines[3] == f"The last good checkpoint beside it: {tmp_path / '10'}"
    shutil.rmtree(tmp_path / "10")
    shutil.rmtree(tmp_path / "9")
    with pytest.raises(CheckpointDamaged, match="No other checkpoint beside it is whole"):
        checkpoint.verify(tmp_path / "11")


def test_chunks_are_found_in_an_index_of_several_levels(tmp_path):
    """Orbax's index is one node up to half a million chunks; above that it is a tree."""
    config = {"max_inline_value_bytes": 10, "max_decoded_node_bytes": 600}
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/", "config": config}).result()
    rng = random.Random(0)
    want = {f"params.layer_{i:03}.kernel": rng.randbytes(50 + i) for i in range(300)}
    with ts.Transaction() as transaction:
        for name, value in want.items():
            store.with_transaction(transaction)[f"{name}/c/0/{len(value) % 3}"] = value
    index, found = checksums._Index(tmp_path), {}
    assert index.leaves == set(want)
    for file in (f for f in files_of(tmp_path) if f.name != "manifest.ocdbt"):
        data, at = file.read_bytes(), 0
        for length, leaf in index.segments(str(file.relative_to(tmp_path)), len(data)):
            found |= {leaf: data[at : at + length]}
            at += length
        assert at == len(data)
    found.pop(checksums.EVERY)
    assert found == want
