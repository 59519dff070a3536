"""What a person sees while the tests run: how many are done, how long it took and how long it will take.

A line every ten seconds (on a terminal one line that changes every second) in place of a dot per test. Failures are
named as they happen.
"""

from __future__ import annotations

import time

import pytest


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Progress:
    """Reports on the process that the user started; workers of xdist send their results there."""

    def __init__(self, terminal, now=time.monotonic):
        self.terminal, self.now = terminal, now
        self.live = terminal.isatty
        self.total = self.done = self.failed = 0
        self.started = self.shown = now()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node, ids):
        self.begin(len(ids))

    def pytest_collection_finish(self, session):
        self.begin(len(session.items))

    def begin(self, total: int) -> None:
        if total and not self.total:
            self.total, self.started = total, self.now()
            self.show()

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report):
        """No letter for a test that passes; what else it counts as is pytest's own affair."""
        return ("passed", "", "PASSED") if report.passed and report.when == "call" else None

    def pytest_runtest_logreport(self, report):
        self.failed += report.failed
        self.done += report.when == "teardown"
        if report.failed:
            self.write(f"FAILED {report.nodeid}", last=True)
        if self.now() - self.shown >= (1 if self.live else 10) or self.done == self.total:
            self.show()

    def show(self) -> None:
        self.shown, took = self.now(), self.now() - self.started
        left = (
            f", about {clock(took / self.done * (self.total - self.done))} left"
            if self.done and took > 5
            else ""
        )
        failed = f", {self.failed} failed" if self.failed else ""
        share = self.done / max(self.total, 1)
        text = f"{share:4.0%}  {self.done} of {self.total} tests{failed}, {clock(took)}{left}"
        self.write(text, last=self.done == self.total)

    def write(self, text: str, *, last: bool = False) -> None:
        if not self.live:
            self.terminal.write_line(text)
            return
        self.terminal.rewrite(text, erase=True)
        if last:
            self.terminal.write_line("")


def install(config) -> None:
    """Put it in place, unless every test is named (`-v`), or this process is a worker."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput") and config.get_verbosity() <= 0:
        config.pluginmanager.register(Progress(terminal), "progress")
        terminal.write_line("Each worker starts jax and collects the tests, which takes a few seconds.")
        terminal._show_progress_info = False  # pytest's own percentages, at the end of each line of dots
