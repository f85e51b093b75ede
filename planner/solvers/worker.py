"""The second process of `auto`: HiGHS, or another search; and the first process's end of the line.

Run as `python -m planner.solvers.worker`. Messages are length-prefixed pickles between parent and
child of the same program: to the child first (problem, kind, seconds, seed), then incumbents; to
the parent incumbents (cost, x, bound, price), whether the problem was proven infeasible, and
whether the choice is one that a run ended with. The child ignores Ctrl-C (the parent ends it) and
ends when its input closes.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
from typing import IO, Any

import numpy as np

from planner.solvers.bounds.messages import Incumbent, Rising, raise_bound
from planner.solvers.problem import Budget, Problem


def _put(stream: IO[bytes], message: Any) -> None:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(struct.pack("<q", len(data)) + data)
    stream.flush()


def _get(stream: IO[bytes]) -> Any:
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    return pickle.loads(stream.read(struct.unpack("<q", head)[0]))


class _Inbox:
    """Incumbents that the other side sent, read by a thread, merged on demand."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.messages: list[tuple[float, np.ndarray | None, float, np.ndarray, bool, bool]] = []
        self.closed = False
        self.infeasible = False
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self.thread.start()

    def _read(self, stream: IO[bytes]) -> None:
        try:
            while True:
                message = _get(stream)
                with self.lock:
                    self.messages.append(message)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):
            self.closed = True

    def merge(self, best: Incumbent) -> list[np.ndarray]:
        """Take over what is better; the choices that runs ended with."""
        with self.lock:
            fresh, self.messages = self.messages, []
        ended = []
        for cost, x, bound, price, infeasible, end in fresh:
            self.infeasible |= infeasible
            if end and x is not None:
                ended.append(x)
            if x is not None:
                best.offer(x.copy(), cost)
            if bound > best.bound:
                best.bound = bound
                if len(price):
                    best.price = price
        return ended


class Partner:
    """The parent's handle on the second process."""

    def __init__(self, problem: Problem, kind: str, time_s: float, seed: int) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "planner.solvers.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.inbox = _Inbox(self.process.stdout)
        with contextlib.suppress(OSError):
            _put(self.process.stdin, (problem, kind, time_s, seed))

    @property
    def infeasible(self) -> bool:
        """The other process proved that nothing is feasible."""
        return self.inbox.infeasible

    def alive(self) -> bool:
        """Still working, or with messages to collect."""
        return not self.inbox.closed or bool(self.inbox.messages)

    def collect(self, best: Incumbent) -> list[np.ndarray]:
        """Take over what the other process found; the choices that its runs ended with."""
        return self.inbox.merge(best)

    def send(self, best: Incumbent) -> None:
        """Tell the other process about the incumbent."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            _put(self.process.stdin, (best.cost, best.x, best.bound, best.price, False, False))

    def close(self) -> None:
        """End the other process."""
        self.process.kill()
        self.process.wait()
        self.inbox.thread.join(timeout=5)
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError, ValueError):
                stream.close()  # type: ignore[union-attr]


def main() -> None:
    """Serve one problem."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a solver's chatter must not reach the messages
    problem, kind, time_s, seed = _get(source)
    inbox = _Inbox(source)
    if kind == "ilp":
        _serve_ilp(problem, time_s, sink)
    else:
        _serve_search(problem, time_s, seed, sink, inbox)
    os._exit(0)  # the reading thread may still wait for input


def _serve_ilp(problem: Problem, time_s: float, sink: IO[bytes]) -> None:
    from planner.solvers import ilp
    from planner.solvers.problem import evaluate

    found = ilp.solve_reduced(problem, Budget(time_limit_s=time_s))
    x = np.array(found.choice, np.int64) if found.choice else None
    cost = float(evaluate(problem, found.choice).cost) if found.choice else np.inf
    bound = -np.inf if found.bound is None else found.bound
    _put(sink, (cost, x, bound, np.zeros(0), found.status == "infeasible", False))


def _serve_search(
    problem: Problem, time_s: float, seed: int, sink: IO[bytes], inbox: _Inbox
) -> None:
    from planner.solvers.model import build
    from planner.solvers.neighbourhood import ground, rounds

    began, told = time.monotonic(), np.inf
    state = ground.start(build(problem), seed)
    best = state.best

    def tell() -> None:
        nonlocal told
        if best.x is not None and best.cost < told:
            told = best.cost
            _put(sink, (best.cost, best.x, best.bound, best.price, False, False))

    last = 0.0

    def sync() -> None:
        nonlocal last
        if inbox.closed:
            os._exit(0)
        if time.monotonic() - last > 1.0:
            last = time.monotonic()
            tell()

    # a shorter patience than the first process: another way up, another set of decoded choices
    rising = Rising(best, min(60.0, 0.3 * time_s))

    def go_on(_: float) -> bool:
        sync()
        return rising.worthwhile()

    raise_bound(state, go_on, patience=8)
    inbox.merge(best)
    tell()

    def ended(x: np.ndarray) -> None:
        _put(sink, (state.model.total(x), x, -np.inf, np.zeros(0), False, True))
        inbox.merge(best)

    if best.x is not None:
        rounds.rounds(
            state,
            1,
            lambda _: (time.monotonic() - began) / time_s,
            rounds.Others(sync, ended, lambda: None),
            seed,
        )
    tell()


if __name__ == "__main__":
    main()
