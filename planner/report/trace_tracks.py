"""Tracks of a trace: events one behind the other, kernels on one line, collectives on the other."""

from __future__ import annotations

from typing import Any

KERNELS = 0


LINKS = 1


MICRO = 1e6  # trace times are microseconds


class Track:
    """Events of one process; `now` is where the next one starts, in seconds."""

    def __init__(self, process: int = 0, name: str = "", order: int = 0) -> None:
        self.events: list[dict[str, Any]] = []
        self.now, self.process = 0.0, process
        if name:
            self.events += [
                {
                    "name": "process_name",
                    "ph": "M",
                    "pid": process,
                    "tid": 0,
                    "args": {"name": name},
                },
                {
                    "name": "process_sort_index",
                    "ph": "M",
                    "pid": process,
                    "tid": 0,
                    "args": {"sort_index": order},
                },
            ]
        self.events += [
            {"name": "thread_name", "ph": "M", "pid": process, "tid": t, "args": {"name": n}}
            for t, n in ((KERNELS, "kernels"), (LINKS, "collectives"))
        ]

    def add(self, track: int, name: str, seconds: float, what: dict[str, Any]) -> None:
        start, end = (round(x * MICRO, 3) for x in (self.now, self.now + seconds))
        self.now += seconds
        if (
            end > start
            # ends and starts are rounded alike: a slice that ran into the next by a nanosecond
            # would be nested in it
        ):
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
