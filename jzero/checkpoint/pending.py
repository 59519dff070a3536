"""Saves in the background, and what becomes of them when the process ends.

[Note: saves at the end of a process]
Orbax writes in daemon threads that start other threads. When the main thread has ended, no new ones can start: Python
closes its thread pools before it runs any `atexit` function, and from 3.12 on refuses threads even earlier.
A save under way can then neither finish nor fail, and the process waits for it forever. So it is finished earlier:
from 3.12 on when the main thread leaves its outermost frame, as `sys.monitoring` reports; in 3.11 by
`threading._register_atexit`, which the thread pools use themselves. A save that takes longer than `EXIT_SECONDS` is
abandoned: nothing gets its final name, and the process ends with status 1.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  (it registers first, and so runs after `_at_exit`)
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

EXIT_SECONDS = 300.0  # that the end of a process waits for saves under way
GRACE_SECONDS = (
    15.0  # from an abandoned save to the end of the process, for other functions that run at the exit
)

_under_way: dict[Future, Path] = {}  # also failed ones whose error nobody has seen
_changes = threading.Lock()
_state = {"registered": False, "failed": False}
_ender = threading.Event()


def start(path: Path, work: Callable[[], None]) -> Future:
    """Runs `work`, which saves `path`, in a thread; the end of the process waits for it.

    Returns:
      Its future; pass it to `result`.
    """
    future: Future = Future()
    with _changes:
        if not _state["registered"]:
            threading._register_atexit(_at_exit)  # type: ignore[attr-defined]
            atexit.register(_exit_status)
            threading.Thread(target=_end_later, daemon=True, name="jzero end of the process").start()
            _watch_main_thread()
            _state["registered"] = True
        _under_way[future] = path
    threading.Thread(target=_run, args=(future, work), daemon=True, name=f"jzero save {path.name}").start()
    return future


def _run(future: Future, work: Callable[[], None]) -> None:
    try:
        work()
    except BaseException as error:
        future.set_exception(error)
    else:
        with _changes:
            _under_way.pop(future, None)
        future.set_result(None)


def result(future: Future, timeout: float | None = None) -> None:
    """Waits for a save, and raises what went wrong; TimeoutError after `timeout` seconds."""
    try:
        future.result(timeout)
    finally:
        if future.done():
            with _changes:
                _under_way.pop(future, None)


def _watch_main_thread() -> None:
    """Calls `_at_exit` when the main thread leaves its outermost frame, by a return or an exception."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    monitoring = getattr(sys, "monitoring", None)  # since Python 3.12
    if monitoring is None or frame is None:
        return
    while frame.f_back is not None:
        frame = frame.f_back
    free = [tool for tool in (3, 4, 5, 2, 1, 0) if monitoring.get_tool(tool) is None]
    if not free:
        return
    tool, events, outermost = free[0], monitoring.events, frame.f_code

    def left(code: Any, *_: Any) -> None:
        if code is outermost and threading.current_thread() is threading.main_thread():
            monitoring.set_events(tool, 0)
            _at_exit()

    monitoring.use_tool_id(tool, "jzero.checkpoint")
    monitoring.register_callback(tool, events.PY_RETURN, left)
    monitoring.register_callback(tool, events.PY_UNWIND, left)
    monitoring.set_local_events(tool, outermost, events.PY_RETURN)
    monitoring.set_events(tool, events.PY_UNWIND)  # of all frames: there is no such event for one frame


def _at_exit() -> None:
    """Finishes what is under way; see [Note: saves at the end of a process]."""
    until = time.monotonic() + EXIT_SECONDS
    for future, path in list(_under_way.items()):
        _under_way.pop(future, None)
        try:
            if not future.done():
                _say(
                    f"the process ends while {path} is written. Waiting for it, at most {EXIT_SECONDS:.0f} s."
                )
            future.result(max(until - time.monotonic(), 0))
            _say(f"{path} is finished.")
        except BaseException as error:
            abandoned = not future.done()
            why = (
                "it took too long"
                if isinstance(error, TimeoutError) and abandoned
                else str(error) or repr(error)
            )
            _say(f"{path} is {'abandoned' if abandoned else 'not saved'}: {why}. Nothing there is changed.")
            if not _state["failed"]:
                _state["failed"] = True
                _ender.set()


def _end_later() -> None:
    """Ends the process before Python waits for the threads of a save that failed or was abandoned."""
    _ender.wait()
    time.sleep(GRACE_SECONDS)
    _exit_status()


def _exit_status() -> None:
    """The process of a save that is lost ends with 1, not 0."""
    if _state["failed"]:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _say(text: str) -> None:
    print(f"jzero.checkpoint: {text}", file=sys.stderr, flush=True)
