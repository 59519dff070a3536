"""The lines of Python that the operations of a compiled program come from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from jzero.proof.hlo import Instruction

PACKAGE = str(Path(__file__).parents[1])
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_ROW = re.compile(r"(\d+) (.*)")
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_INLINE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')


class SourceLines:
    """Where operations come from, by the tables at the head of a program's text (or, in older ones, their lines)."""

    def __init__(self, text: str):
        tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
        current: dict[int, str] | None = None
        for line in text[: text.find("\n%")].splitlines():
            current = tables.get(line, None if not line else current)
            if current is not None and (row := _ROW.match(line)):
                current[int(row[1])] = row[2]
        self._files, self._locations = tables["FileNames"], tables["FileLocations"]
        self._frames = tables["StackFrames"]
        self._known: dict[int, str] = {}

    def of(self, i: Instruction) -> str:
        """`train.py:41 loss`: the innermost line of the user's code that an instruction comes from, or empty.

        Where all of its lines are in installed packages, the innermost of them.
        """
        if inline := _INLINE.search(i.attrs):
            return f"{_short(inline[1])}:{inline[2]}"
        frame = _FRAME.search(i.attrs)
        if frame is None:
            return ""
        number = int(frame[1])
        if number not in self._known:
            lines = list(self._lines(number))
            own = (line for line, file in lines if not _is_installed(file))
            self._known[number] = next(own, lines[0][0] if lines else "")
        return self._known[number]

    def _lines(self, number: int) -> Iterator[tuple[str, str]]:
        """The lines of a stack, the innermost first, each with its file."""
        seen = set[int]()
        while number in self._frames and number not in seen:
            seen.add(number)
            location = self._locations.get(_field(self._frames[number], "file_location_id"), "")
            file = self._files.get(_field(location, "file_name_id"), "").strip('"')
            if file:
                yield f"{_short(file)}:{_field(location, 'line')}", file
            number = _field(self._frames[number], "parent_frame_id") - 1  # XLA counts parents from 1, 0 being none


def _field(text: str, name: str) -> int:
    found = re.search(rf"\b{name}=(\d+)", text)
    return int(found[1]) if found else 0


def _short(file: str) -> str:
    """The file with its folder."""
    return "/".join(Path(file).parts[-2:])


def _is_installed(file: str) -> bool:
    """True for a file of an installed package or of jzero, except its presets: they are the user's model there."""
    return "site-packages" in file or (file.startswith(PACKAGE) and not file.endswith("presets.py"))
