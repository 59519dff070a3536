"""train/data.py: the split, the pipeline's order and its resumption, the bigram baseline."""

import itertools
import json
import math
import re

import numpy as np
import pytest

from train import data


def folder_of(root, texts):
    for name, text in texts.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text)
    return root


def noise(length, seed=0):
    return np.random.default_rng(seed).integers(1, 256, length).astype(np.uint8)


# -- the split


def test_split_is_disjoint_complete_and_the_same_in_any_order():
    names = [f"package/module_{i}.py" for i in range(107)]
    train, heldout = data.split_names(names)
    assert sorted(train + heldout) == sorted(names)
    assert len(heldout) == 107 // data.ONE_IN
    assert data.split_names(names[::-1]) == (train, heldout)


def test_two_files_leave_one_for_each_part():
    train, heldout = data.split_names(["a.txt", "b.txt"])
    assert len(train) == len(heldout) == 1


def test_folder_is_split_by_file_without_hidden_and_binary_ones(tmp_path):
    texts = {f"part{i % 3}/{i}.txt": f"text {i} ".encode() * 7 for i in range(45)}
    folder_of(tmp_path, texts | {".git/config": b"hidden", "image.bin": b"\x89\0\0\1"})
    corpus = data.load(tmp_path)
    train, heldout = (part.tobytes().split(data.END_OF_FILE)[:-1] for part in (corpus.train, corpus.heldout))
    assert sorted(train + heldout) == sorted(texts.values())
    assert len(heldout) == 45 // data.ONE_IN
    assert "43 files to train on, 2 others held out" in corpus.source
    assert data.load(tmp_path).fingerprint == corpus.fingerprint


def test_single_file_is_split_by_position_and_says_so(tmp_path):
    file = tmp_path / "book.txt"
    file.write_bytes(noise(1000).tobytes())
    for path in (file, tmp_path):
        corpus = data.load(path)
        np.testing.assert_array_equal(np.concatenate([corpus.train, corpus.heldout]), noise(1000))
        assert len(corpus.heldout) == 50
        assert "a single file, so split by position: the last 1/20" in corpus.source


def test_standard_library_is_the_default():
    corpus = data.load()
    assert len(corpus.train) > 5_000_000
    assert 100_000 < len(corpus.heldout) < len(corpus.train) / 10
    assert b"class TestCase" in corpus.train.tobytes() + corpus.heldout.tobytes()
    assert data.load().fingerprint == corpus.fingerprint


def test_missing_path():
    with pytest.raises(FileNotFoundError, match=r"^--data /no/such: no such file or folder\. Pass a text"):
        data.load("/no/such")


def test_folder_without_text(tmp_path):
    folder_of(tmp_path, {"a.bin": b"\0\1"})
    with pytest.raises(ValueError, match=r"^--data .*: no text in this folder \(hidden and binary"):
        data.load(tmp_path)


def test_too_small_says_what_is_there_and_what_is_needed(tmp_path):
    file = tmp_path / "short.txt"
    file.write_bytes(noise(2000).tobytes())
    there = "--data: the held-out part has 100 bytes, one batch takes 16 x 32 + 1 = 513 ("
    remedy = "). Give more text, or a smaller --batch or --seq."
    with pytest.raises(ValueError, match=f"^{re.escape(there)}.*{re.escape(remedy)}$"):
        data.check_size(data.load(file), seq=32, batch=16)


# -- windows and batches


def test_windows_predict_each_byte_once():
    text = noise(1 + 17 * 9 + 5)
    assert data.count_windows(text, 17) == 9
    rows = data.windows(text, np.arange(9), 17)
    assert (rows.shape, rows.dtype) == ((9, 18), np.int32)
    np.testing.assert_array_equal(rows[:, 1:].ravel(), text[1 : 1 + 17 * 9])
    np.testing.assert_array_equal(rows[:, :-1].ravel(), text[: 17 * 9])


def take(stream, count):
    return np.stack([next(stream)["tokens"] for _ in range(count)])


def test_same_seed_same_batches():
    text = noise(5000)
    one, two, other = (take(data.batches(text, seq=16, batch=8, seed=s), 50) for s in (1, 1, 2))
    assert (one.shape, one.dtype) == ((50, 8, 17), np.int32)
    np.testing.assert_array_equal(one, two)
    assert (one != other).any()


def test_an_epoch_takes_every_window_once_and_the_next_has_another_order():
    text = noise(1 + 16 * 40)
    rows = take(data.batches(text, seq=16, batch=8, seed=0), 10).reshape(2, 40, 17)
    every = sorted(data.windows(text, np.arange(40), 16).tolist())
    assert sorted(rows[0].tolist()) == sorted(rows[1].tolist()) == every
    assert (rows[0] != rows[1]).any()


@pytest.mark.parametrize("taken", [0, 1, 13])
def test_a_restored_iterator_goes_on_with_the_next_batch(taken):
    text = noise(3000)
    stream = data.batches(text, seq=16, batch=8, seed=3)
    take(stream, taken) if taken else None
    state = stream.get_state()
    wanted = take(stream, 30)
    again = data.batches(text, seq=16, batch=8, seed=3)
    again.set_state(state)
    np.testing.assert_array_equal(take(again, 30), wanted)


def test_two_processes_share_the_rows_of_one():
    text = noise(3000)
    whole = take(data.batches(text, seq=16, batch=8, seed=0), 20)
    halves = [take(data.batches(text, seq=16, batch=8, seed=0, process=i, processes=2), 20) for i in range(2)]
    assert halves[0].shape == (20, 4, 17)
    np.testing.assert_array_equal(np.concatenate(halves, axis=1), whole)


@pytest.mark.default_cases("1-2-8", "7-4-1", "23-8-2", "23-4-2")
@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (2, 8), (8, 2), (4, 2)])
@pytest.mark.parametrize("taken", [1, 7, 23])
def test_another_number_of_processes_goes_on_without_repeating_or_dropping_a_row(before, after, taken):
    """The state of process 0 is what a checkpoint keeps; 23 batches of 8 are past the first epoch of 125 windows."""
    text = noise(1 + 16 * 125)
    whole = take(data.batches(text, seq=16, batch=8, seed=5), 40)

    def streams(count):
        return [data.batches(text, seq=16, batch=8, seed=5, process=i, processes=count) for i in range(count)]

    first = streams(before)
    np.testing.assert_array_equal(np.concatenate([take(s, taken) for s in first], axis=1), whole[:taken])
    state = first[0].get_state()
    assert all(s.get_state() == state for s in first)  # any process's would do
    second = streams(after)
    for s in second:
        s.set_state(json.loads(json.dumps(state)))
    rest = np.concatenate([take(s, 40 - taken) for s in second], axis=1)
    np.testing.assert_array_equal(rest, whole[taken:])


def test_heldout_windows_are_evenly_spaced_whole_batches():
    text = noise(1 + 16 * 100)
    picked = data.heldout_windows(text, seq=16, batch=8, most=50)
    assert picked.shape == (6, 8, 17)
    index = [text.tobytes().find(row.astype(np.uint8).tobytes()) // 16 for row in picked.reshape(-1, 17)]
    assert index == [i * 100 // 48 for i in range(48)]
    assert data.heldout_windows(text, seq=16, batch=8, most=10_000).shape == (12, 8, 17)


# -- the baseline


def test_bigram_equals_a_brute_force_count():
    train = np.frombuffer(b"the cat sat on the mat; that is that", np.uint8)
    heldout = np.frombuffer(b"the hat that sat, and that is the", np.uint8)
    windows = data.heldout_windows(heldout, seq=8, batch=2, most=4)
    assert windows.shape == (2, 2, 9)

    text, total, count = train.tobytes(), 0.0, 0
    for row in windows.reshape(-1, 9):
        for before, byte in itertools.pairwise(row):
            pair = len(re.findall(b"(?=" + re.escape(bytes([before, byte])) + b")", text))
            first = text[:-1].count(bytes([before]))
            total -= math.log((pair + 1) / (first + 256))
            count += 1
    assert count == 32
    assert data.bigram_loss(train, windows) == pytest.approx(total / count, rel=1e-12)
