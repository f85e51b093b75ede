"""The terminal: stdout is data, stderr is talk; colour and the live line only where a person looks,
and NO_COLOR is honoured."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

from costmodels.hardware.units import show_time
from planner.support.emphasis import printable

NARROWEST, WIDEST, USUAL = 60, 140, 100


def width() -> int:
    """Columns to write for: the terminal's (or COLUMNS), within reason; 100 when nobody says."""
    known = sys.stdout.isatty() or os.environ.get("COLUMNS")
    return (
        max(NARROWEST, min(WIDEST, shutil.get_terminal_size((USUAL, 24)).columns))
        if known
        else USUAL
    )


def colour(stream: TextIO) -> bool:
    """Whether a stream shows colours: a terminal, and NO_COLOR is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def data(text: str) -> None:
    """A result, to stdout."""
    _write(sys.stdout, text)


def say(text: str) -> None:
    """Talk, to stderr."""
    _write(sys.stderr, text)


def _write(stream: TextIO, text: str) -> None:
    """Whole lines that the stream can show."""
    text = printable(text, stream.encoding or "utf-8")
    stream.write(text if text.endswith("\n") else text + "\n")
    stream.flush()


class Live:
    """One line that tells how a search (or what else `doing` says) stands: incumbent, bound, gap
    and seconds. `report` is the search's progress callback.

    interrupted: whether Ctrl-C was pressed. The first one is the search's to catch; it writes the
    best plan so far.
    """

    def __init__(self, shown: bool, doing: str = "searching") -> None:
        self.doing = doing
        self.shown = shown and sys.stderr.isatty()
        self.interrupted = False
        self._started = time.monotonic()
        self._stage = ""
        self._best: float | None = None
        self._bound: float | None = None
        self._done = threading.Event()

    def report(self, stage: str, best_s: float | None, bound_s: float | None) -> None:
        """A new incumbent or bound, in seconds; stage: what is looked at."""
        self.doing = stage if stage.startswith("compiling") else self.doing
        self._stage, self._best, self._bound = stage, best_s, bound_s

    def line(self) -> str:
        """The line as it stands."""

        parts = [f"{self.doing} {time.monotonic() - self._started:.0f} s"]
        if self._best is not None:
            parts.append(f"best {show_time(self._best)}")
            if self._bound:
                parts.append(f"bound {show_time(self._bound)}")
                parts.append(f"gap {max(0.0, 100 * (1 - self._bound / self._best)):.1f} %")
        if self._stage.startswith("mesh "):
            parts.append(self._stage)
        return "   ".join(parts)

    def _tick(self) -> None:
        while not self._done.wait(0.25):
            sys.stderr.write(f"\r\x1b[2K{printable(self.line())[: width() - 1]}")
            sys.stderr.flush()


@contextlib.contextmanager
def live(shown: bool, doing: str = "searching") -> Iterator[Live]:
    """A Live line while the block runs, removed afterwards."""
    state = Live(shown, doing)
    ticker = threading.Thread(target=state._tick, daemon=True)
    before = signal.getsignal(signal.SIGINT)

    def stop(number: int, frame: object) -> None:
        state.interrupted = True
        raise KeyboardInterrupt

    ours = threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGINT, stop)
    if state.shown:
        ticker.start()
    try:
        yield state
    finally:
        state._done.set()
        if ours:
            signal.signal(signal.SIGINT, before)
        if state.shown:
            ticker.join()
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
