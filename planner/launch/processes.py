"""Processes of a job on this machine (or reached from it): started together, logged apart, ended
together.

A job is over when every process has ended well, when one ends otherwise, when no process has
written anything for `timeout_s`, or when `watch` says that another node has ended it. Processes
that are left then get SIGTERM, and SIGKILL after `GRACE_S`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from planner.errors import PlanError

LOCK = ".launch"
"""A file of a job's folder: who runs a job there holds it, and no process that it starts."""
GRACE_S = 5.0
SETTLE_S = 0.5
"""After the first failure: how long the others may take to show theirs, so that the first cause is
named, not a consequence."""
POLL_S = 0.05
FAILED = 1
TIED = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"
"""Linux: a process that becomes another one, and is killed when its launcher is (prctl
PR_SET_PDEATHSIG, SIGKILL)."""
LAST_LINES = 8
CONNECTING = b"[Gloo]"
"""Lines that CPU collectives write for every group of devices; logs keep them."""


@dataclass(frozen=True)
class Process:
    """One process of a job; `where` names its host in messages, "" for this one; `role`: what its
    number is of."""

    rank: int
    command: tuple[str, ...]
    log: Path
    where: str = ""
    role: str = "rank"

    def __str__(self) -> str:
        return f"{self.role} {self.rank}" + (f" ({self.where})" if self.where else "")


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """The folder of a job, of this one alone while it runs. Raises PlanError P209 where another
    launcher of this machine runs one in it."""
    try:
        import fcntl
    except ImportError:  # Windows has no such locks
        yield
        return
    with (folder / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            other = file.read(20).strip()
            raise PlanError(
                "P209",
                f"another plan launch{f' (process {other})' if other.isdecimal() else ''} runs a"
                f" job in {str(folder)!r}",
                help=["-o another folder, or wait until it has ended"],
            ) from None
        except OSError:  # a file system without locks
            yield
            return
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def supervise(
    processes: Sequence[Process],
    environment: Mapping[str, str],
    timeout_s: float,
    say: Callable[[str], None],
    watch: Callable[[], str] = str,
    servers: Sequence[Process] = (),
) -> None:
    """Run processes to their end; what the first writes is passed to `say` by the line. watch: ""
    while all is well, else why to stop. servers: run as long as the others do.

    Raises PlanError: P204 when one fails (naming it, its log and its last lines) or cannot be
    started, P205 when nothing is written for timeout_s.
    """
    running: dict[Process, subprocess.Popen[bytes]] = {}
    followed, seen, heard = 0, -1, time.monotonic()
    old = [signal.signal(s, _interrupt) for s in (signal.SIGTERM, signal.SIGHUP)]
    try:
        for p in (*processes, *servers):
            running[p] = _start(p, environment)
        while True:
            codes = {p: child.poll() for p, child in running.items()}
            followed = _follow(processes[0].log, followed, say)
            if any(codes.values()):
                raise _failure(running)
            if all(codes[p] == 0 for p in processes):
                return
            why = watch()
            if why:
                raise PlanError(
                    "P204",
                    why,
                    detail=[f"logs of this node: {processes[0].log.parent}"],
                    exit_code=FAILED,
                )
            written = sum(p.log.stat().st_size for p in processes)
            if written != seen:
                seen, heard = written, time.monotonic()
            elif time.monotonic() - heard > timeout_s:
                raise PlanError(
                    "P205",
                    f"no process has written anything for {timeout_s:.0f} s: the job was ended",
                    detail=[_tail(p) for p in processes],
                    help=["--timeout S for steps or compilations that take longer"],
                    exit_code=FAILED,
                )
            time.sleep(POLL_S)
    finally:
        _end(running.values())
        _follow(processes[0].log, followed, say)
        for s, handler in zip((signal.SIGTERM, signal.SIGHUP), old, strict=True):
            signal.signal(s, handler)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _start(p: Process, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    if shutil.which(p.command[0]) is None:
        raise PlanError(
            "P204",
            f"{p.role} {p.rank} cannot be started: there is no program {p.command[0]!r}",
            help=["--python FILE"],
            exit_code=FAILED,
        )
    command = (
        (sys.executable, "-S", "-c", TIED, *p.command) if sys.platform == "linux" else p.command
    )
    with p.log.open("wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )


def _follow(log: Path, start: int, say: Callable[[str], None]) -> int:
    """Pass on whole lines written after `start`, but those of connections being made; returns where
    the next begins."""
    if not log.exists():
        return start
    with log.open("rb") as f:
        f.seek(start)
        *lines, _ = f.read().split(b"\n")
    for line in (x for x in lines if not x.startswith(CONNECTING)):
        say(line.decode(errors="replace").rstrip("\r"))
    return start + sum(len(line) + 1 for line in lines)


def _failure(running: Mapping[Process, subprocess.Popen[bytes]]) -> PlanError:
    """Which process failed. One that was killed is the cause; others that abort when it is gone are
    consequences."""
    first = [p for p, child in running.items() if child.returncode]
    time.sleep(SETTLE_S)
    codes = {p: child.poll() for p, child in running.items()}
    killed = [
        p
        for p, code in codes.items()
        if code in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGSEGV)
    ]
    cause = (killed or first)[0]
    others = [
        f"{p} ended after it: {_ending(code)}"
        for p, code in codes.items()
        if code and p is not cause
    ]
    what = f"{cause} {_ending(codes[cause])}; the job was ended"
    help = [
        "run the same command again: with --checkpoints DIR it goes on from the last whole"
        " checkpoint"
    ]
    return PlanError(
        "P204",
        what,
        detail=[f"log: {cause.log}", *_last_lines(cause.log), *others],
        help=help,
        exit_code=FAILED,
    )


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"failed with exit code {code}"


def _tail(p: Process) -> str:
    last = _last_lines(p.log)
    return f"{p}: {p.log}: {last[-1].strip() if last else 'empty'}"


def _last_lines(log: Path) -> list[str]:
    """What a process wrote last."""
    lines = [
        line
        for line in log.read_text(errors="replace").splitlines()
        if line.strip() and not line.startswith(CONNECTING.decode())
    ]
    return [f"  {line[:160]}" for line in lines[-LAST_LINES:]]


def _end(children: Iterable[subprocess.Popen[bytes]]) -> None:
    """SIGTERM to those left and what they started, then SIGKILL."""
    running = [c for c in children if c.poll() is None]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for child in running:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, number)
        deadline = time.monotonic() + GRACE_S
        while running and time.monotonic() < deadline:
            running = [c for c in running if c.poll() is None]
            time.sleep(POLL_S)
