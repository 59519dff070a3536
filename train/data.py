"""Bytes of real text, split by file into train and held-out; a grain pipeline over them; a bigram to beat.

By default the text is the Python standard library's own sources on this machine. It is long enough to learn
from, needs no download, and every machine with Python has it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sysconfig
import zlib
from pathlib import Path

import grain
import numpy as np

VOCAB = 256
END_OF_FILE = b"\0"  # between files, so that a model can learn where one begins
ONE_IN = 20  # held-out files; of a single file, the last 1/20 of its bytes

# Tests outweigh the library itself; the codec tables and the help texts are generated.
_SKIPPED = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Train and held-out bytes.

    Attributes:
      train: u8[bytes].
      heldout: u8[bytes], of other files (or of the end of a single one).
      source: where the bytes are from and how they were split, for a person to read.
    """

    train: np.ndarray
    heldout: np.ndarray
    source: str

    @property
    def fingerprint(self) -> str:
        """Changes with any byte of either part; a resumed run compares it."""
        return f"{zlib.crc32(self.train.tobytes()):08x}-{zlib.crc32(self.heldout.tobytes()):08x}"


def load(path: str | Path | None = None) -> Corpus:
    """The corpus of a file, of a folder, or (None) of the standard library's sources.

    Raises:
      FileNotFoundError: there is nothing at `path`.
      ValueError: a folder without text files.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [f for f in root.rglob("*.py") if not _SKIPPED & set(f.relative_to(root).parts)]
        return _split_by_file(root, files, f"the Python standard library in {root}")
    root = Path(path)
    if root.is_file():
        return _split_by_position(root)
    if not root.is_dir():
        raise FileNotFoundError(f"--data {path}: no such file or folder. Pass a text file or a folder.")
    files = [f for f in root.rglob("*") if _is_text(f) and not _is_hidden(f.relative_to(root))]
    if not files:
        raise ValueError(f"--data {path}: no text in this folder (hidden and binary files are left out).")
    return _split_by_position(files[0]) if len(files) == 1 else _split_by_file(root, files, str(root))


def split_names(names: list[str]) -> tuple[list[str], list[str]]:
    """Train and held-out names, sorted. Held out is the twentieth with the smallest hashes, at least one."""
    by_hash = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    held = max(1, len(names) // ONE_IN)
    return sorted(by_hash[held:]), sorted(by_hash[:held])


def _split_by_file(root: Path, files: list[Path], what: str) -> Corpus:
    train, heldout = split_names([f.relative_to(root).as_posix() for f in files])
    source = f"{what}: {len(train)} files to train on, {len(heldout)} others held out"
    return Corpus(_bytes(root / name for name in train), _bytes(root / name for name in heldout), source)


def _split_by_position(file: Path) -> Corpus:
    text = np.frombuffer(file.read_bytes(), np.uint8)
    cut = len(text) - len(text) // ONE_IN
    source = f"{file}: a single file, so split by position: the last 1/{ONE_IN} of its bytes is held out"
    return Corpus(text[:cut], text[cut:], source)


def _bytes(files) -> np.ndarray:
    return np.frombuffer(b"".join(file.read_bytes() + END_OF_FILE for file in files), np.uint8)


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _is_text(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as f:
        return b"\0" not in f.read(8192)


def count_windows(text: np.ndarray, seq: int) -> int:
    """How many windows of `seq + 1` bytes a text has; neighbours share a byte, so each is predicted once."""
    return max(0, (len(text) - 1) // seq)


def windows(text: np.ndarray, index: np.ndarray, seq: int) -> np.ndarray:
    """i32[n, seq + 1]: the windows with these n numbers."""
    return text[index[:, None] * seq + np.arange(seq + 1)].astype(np.int32)


def batches(
    text: np.ndarray, *, seq: int, batch: int, seed: int, process: int = 0, processes: int = 1
) -> grain.DatasetIterator:
    """An endless iterator of {"tokens": i32[batch / processes, seq + 1]}, shuffled anew in each epoch.

    The same seed gives the same batches; each process reads its own rows of them, in order. `get_state()`
    is a small dict to save; after `set_state` the next batch is the one that was due.
    """
    mine = slice(process * batch // processes, (process + 1) * batch // processes)
    index = grain.MapDataset.range(count_windows(text, seq)).shuffle(seed).repeat().batch(batch)
    rows = index.map(lambda numbers: {"tokens": windows(text, numbers[mine], seq)})
    return iter(rows.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)))


def heldout_windows(text: np.ndarray, *, seq: int, batch: int, most: int) -> np.ndarray:
    """i32[batches, batch, seq + 1]: whole batches of at most `most` windows, evenly spaced over the text."""
    there = count_windows(text, seq)
    count = max(1, min(most, there) // batch) * batch
    return windows(text, np.arange(count) * there // count, seq).reshape(-1, batch, seq + 1)


def bigram_loss(train: np.ndarray, windows: np.ndarray) -> float:
    """Nats per byte of an add-one-smoothed bigram model.

    Args:
      train: u8[bytes], whose adjacent pairs are counted.
      windows: i32[..., seq + 1]; each byte but the first of a window is predicted from the one before it: the
        same bytes that the GPT is asked for.
    """
    pairs = train[:-1].astype(np.int32) * VOCAB + train[1:]
    counts = np.bincount(pairs, minlength=VOCAB * VOCAB).reshape(VOCAB, VOCAB) + 1
    log_prob = np.log(counts / counts.sum(1, keepdims=True))
    return -float(log_prob[windows[..., :-1], windows[..., 1:]].mean())


def check_size(corpus: Corpus, *, seq: int, batch: int) -> None:
    """Refuses text that does not fill one batch of each part.

    Raises:
      ValueError: with the bytes that are there and the bytes that one batch takes.
    """
    need = batch * seq + 1
    for name, text in (("train", corpus.train), ("held-out", corpus.heldout)):
        if len(text) < need:
            raise ValueError(
                f"--data: the {name} part has {len(text)} bytes, one batch takes {batch} x {seq} + 1 = "
                f"{need} ({corpus.source}). Give more text, or a smaller --batch or --seq."
            )
