"""What goes wrong in a cache costs time and no plan: faults are noted, and files of others are not
read."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from planner.errors import PlanError

TABLES = ".tables"
"""How the names of files of tables end."""
T = TypeVar("T")


STRICT = "MESHWRIGHT_DEBUG"
"""Where this variable is set, what goes wrong in the cache is an error. Tests run so."""


LONGEST_MESSAGE = 200
"""Letters of a fault, in a plan's file."""


@dataclass
class Faults:
    """What went wrong in a cache that nobody expected: of each kind the first, in words. Without a
    cache there would be a plan, so there is one with it."""

    messages: list[str] = field(default_factory=list)
    unwritten: str = ""
    """Why the folder could not be written, in the system's words: nothing is kept, which is no
    fault of the planner's."""

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Files are written to the folder; where the system refuses, that is noted."""
        try:
            yield
        except OSError as e:
            self.unwritten = self.unwritten or e.strerror or type(e).__name__

    def spare(self, what: str, work: Callable[[], T], otherwise: T) -> T:
        """The result of work on the cache; where that fails, `otherwise`. Errors of users
        (PlanError) are those of the model, and go on."""
        try:
            return work()
        except PlanError:
            raise
        except Exception as e:
            if os.environ.get(STRICT):
                raise
            text = f"{what}: {type(e).__name__}: {e}"[:LONGEST_MESSAGE]
            if text not in self.messages:
                self.messages.append(text)
            return otherwise


def trusted(status: os.stat_result) -> bool:
    """Whether a file is one of the user's own that no other may write."""
    return stat.S_ISREG(status.st_mode) and (
        os.name != "posix" or (status.st_uid == os.geteuid() and not status.st_mode & 0o022)
    )
