"""The largest micro-batch that fits, from as few compiles as possible."""

from __future__ import annotations

from collections.abc import Callable

MOST = 6
CLOSE = 0.01


def largest_that_fits(
    measure: Callable[[int], int], known: dict[int, int], limit: float, *, most: int = MOST
) -> tuple[int, bool]:
    """The largest size whose bytes stay within a limit; bytes grow about linearly with the size.

    Args:
      measure: bytes of a size; expensive.
      known: bytes of sizes that were measured already, at least one.
      limit: bytes.
      most: measurements at most, those in `known` included.

    Returns:
      (size, exact): the largest measured size that fits, or 0 if even 1 does not; and whether the next size does not
      fit, as measured, or as the line says once it has predicted a measurement. If the next may fit, at most 1 % is
      left, unless `most` measurements were made.

    Example:
      >>> largest_that_fits(lambda size: 50 + 7 * size, {8: 106}, 200)
      (21, True)
    """
    known = dict(known)
    trusted = False
    while True:
        fits = [s for s in known if known[s] <= limit]
        fails = [s for s in known if known[s] > limit]
        good, bad = max(fits, default=0), min(fails, default=None)
        if bad is not None and bad - good == 1:
            return good, True
        if good and bad is None and trusted and _next(known, good, bad, limit) - good <= CLOSE * good + 1:
            return good, _line(known, good + 1) > limit
        if good and bad is not None and bad - good <= CLOSE * good:
            return good, False
        if len(known) >= most:
            return good, False
        size = _next(known, good, bad, limit)
        expected = _line(known, size) if len(known) > 1 else None
        known[size] = measure(size)
        trusted = expected is not None and abs(known[size] - expected) <= CLOSE * expected


def _next(known: dict[int, int], good: int, bad: int | None, limit: float) -> int:
    """The size to measure next: where the line meets the limit, inside of what is open."""
    if len(known) == 1:
        (size,) = known
        return 4 * size if good else max(1, size // 4)
    rows = sorted(known.items())
    inside = [row for row in rows if row[0] in (good, bad)]  # both ends of what is open, where both are known
    (a, low), (b, high) = inside if len(inside) == 2 else rows[-2:] if bad is None else rows[:2]
    slope = (high - low) / (b - a)
    guess = b + (limit - high) / slope if slope > 0 else 16 * b
    return max(good + 1, min(int(guess), bad - 1 if bad is not None else 64 * b))


def _line(known: dict[int, int], size: int) -> float:
    """Bytes of a size on the line through the two measured sizes nearest to it."""
    (a, low), (b, high) = sorted(sorted(known.items(), key=lambda row: abs(row[0] - size))[:2])
    return low + (high - low) / (b - a) * (size - a)
