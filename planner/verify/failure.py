"""What a compilation or a run that failed says: the exception's own words, and the line of the
emitted program that it stands on."""

from __future__ import annotations

import linecache
import re
import traceback

from planner.errors import PlanError

LONGEST = 300
"""Letters of an exception or of a line that are shown."""
FILLER = re.compile(
    r"For simplicity, JAX has removed its internal frames|-+$|The above exception was|During"
    r" handling of the above"
)


def remember(file: str, text: str) -> None:
    """Let tracebacks quote a program that was never written to a file."""
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file


def told(error: BaseException, where: str, file: str) -> PlanError:
    """The error for an exception. where: what failed; file: the name under which the program's text
    is remembered."""
    first_line = next(
        (
            line.strip()
            for line in str(error).splitlines()
            if line.strip() and not FILLER.match(line.strip())
        ),
        "",
    )
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file
    ]
    line = (
        [f"line {frames[-1].lineno} of the program: {frames[-1].line}"[:LONGEST]] if frames else []
    )
    help = (
        "this is a mistake in the planner, not in your input: report it with the plan"
        if line
        else "a smaller model or fewer devices, where memory is short"
    )
    return PlanError(
        "P162",
        f"{where} failed: {type(error).__name__}{': ' if first_line else ''}{first_line[:LONGEST]}",
        detail=line,
        help=[help],
    )


def last_words(log: str) -> str:
    """The last line of a process's errors that says something."""
    lines = [line.strip() for line in log.splitlines()]
    return next((line for line in reversed(lines) if line and not FILLER.match(line)), "")[:LONGEST]
