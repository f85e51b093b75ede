"""Tracks of a trace: events one behind the other, kernels on one line, collectives on the other."""

from __future__ import annotations

from typing import Any

KERNELS, LINKS = 0, 1
"""Lines of a track."""
MICRO = 1e6  # trace times are microseconds


def process_events(process: int, name: str, order: int) -> list[dict[str, Any]]:
    """The name of a process of the trace, and where it stands among the others."""
    return [
        {"name": event, "ph": "M", "pid": process, "tid": 0, "args": args}
        for event, args in (
            ("process_name", {"name": name}),
            ("process_sort_index", {"sort_index": order}),
        )
    ]


class Track:
    """Events of one process; `now` is where the next one starts, in seconds."""

    def __init__(self, process: int = 0, name: str = "", order: int = 0) -> None:
        self.events: list[dict[str, Any]] = []
        self.now, self.process = 0.0, process
        if name:
            self.events += process_events(process, name, order)
        self.events += [
            {"name": "thread_name", "ph": "M", "pid": process, "tid": t, "args": {"name": n}}
            for t, n in ((KERNELS, "kernels"), (LINKS, "collectives"))
        ]

    def add(self, track: int, name: str, seconds: float, what: dict[str, Any]) -> None:
        """An event on a line, from now on; nothing where it has no length."""
        start, end = (round(x * MICRO, 3) for x in (self.now, self.now + seconds))
        self.now += seconds
        # Ends and starts are rounded alike: a slice that ran into the next by a nanosecond would be
        # nested in it.
        if end > start:
            self.events.append(
                {
                    "name": name,
                    "ph": "X",
                    "pid": self.process,
                    "tid": track,
                    "ts": start,
                    "dur": round(end - start, 3),
                    "args": what,
                }
            )
