"""The second process of `auto` as the first sees it: what they send each other, and when it ends.

Messages are length-prefixed pickles between parent and child of the same program: to the child
first (problem, kind, seconds, seed), then incumbents; to the parent incumbents (cost, x, bound,
price), whether the problem was proven infeasible, and whether the choice is one that a run ended
with.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import subprocess
import sys
import threading
from typing import IO, Any

import numpy as np

from planner.solvers.bounds.messages import Incumbent
from planner.solvers.problem import Problem


def put(stream: IO[bytes], message: Any) -> None:
    """Write a message, behind its length in eight bytes."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(struct.pack("<q", len(data)) + data)
    stream.flush()


def get(stream: IO[bytes]) -> Any:
    """Read the next message. Raises EOFError where the other side has ended."""
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    return pickle.loads(stream.read(struct.unpack("<q", head)[0]))


class Inbox:
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
                message = get(stream)
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
        self.inbox = Inbox(self.process.stdout)
        with contextlib.suppress(OSError):
            put(self.process.stdin, (problem, kind, time_s, seed))

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
            put(self.process.stdin, (best.cost, best.x, best.bound, best.price, False, False))

    def close(self) -> None:
        """End the other process."""
        self.process.kill()
        self.process.wait()
        self.inbox.thread.join(timeout=5)
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError, ValueError):
                stream.close()  # type: ignore[union-attr]
