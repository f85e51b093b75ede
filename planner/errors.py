"""Errors for users: a code, what is wrong, where, the values, and the next step.

Bad input never shows a traceback: the command line prints `str(error)` and exits with `exit_code`.
"""

from __future__ import annotations

from collections.abc import Sequence

USAGE, NO_PLAN = 2, 3


class PlanError(Exception):
    """`error[CODE]: what`, then indented `detail` lines (file, node, values), then `help:` lines.

    Args:
        code: "P001"-style, stable across releases; listed in docs/errors.md.
        what: one sentence that names the thing and its values.
        detail: where (file, node, tensor) and the values, a line each.
        help: next steps, a line each; only options that exist.
        exit_code: 2 for usage and bad input, 3 when no plan fits.
    """

    def __init__(
        self,
        code: str,
        what: str,
        *,
        detail: Sequence[str] = (),
        help: Sequence[str] = (),
        exit_code: int = USAGE,
    ) -> None:
        self.code, self.what, self.detail, self.help, self.exit_code = (
            code,
            what,
            tuple(detail),
            tuple(help),
            exit_code,
        )
        lines = [
            f"error[{code}]: {what}",
            *(f"  {line}" for line in self.detail),
            *(f"help: {line}" for line in self.help),
        ]
        super().__init__("\n".join(lines))


LIKE = 0.6
"""How like the names of two files must be for one to be meant by the other."""
SHORTEST = 3
"""Letters from which a word counts as the start of a longer name."""


def closest(name: str, known: Sequence[str], cutoff: float = 0.5) -> str:
    """The first name that goes on from what was typed, else the closest, '' when nothing is close
    (cutoff: how close, of 1)."""
    import difflib

    close = [
        k for k in known if len(name) >= SHORTEST and k.startswith(name)
    ] or difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return close[0] if close else ""


def did_you_mean(name: str, known: Sequence[str], cutoff: float = 0.5) -> str:
    """The closest name as a suggestion such as `did you mean 'h100-sxm'?`, or '' when nothing is
    close."""
    near = closest(name, known, cutoff)
    return f"did you mean {near!r}?" if near else ""


def file_meant(path: str) -> list[str]:
    """A suggestion, as a line of help, among the files of its kind beside a path where there is
    none."""
    import os

    folder, name = os.path.split(path)
    try:
        beside = sorted(
            b
            for b in os.listdir(folder or ".")
            if os.path.splitext(b)[1] == os.path.splitext(name)[1]
        )
    except OSError:
        return [f"there is no folder {folder!r}"]
    import difflib

    stems = {os.path.splitext(b)[0]: b for b in beside}
    near = difflib.get_close_matches(
        os.path.splitext(name)[0], list(stems), n=1, cutoff=LIKE
    )  # endings are alike in any case
    return [f"did you mean {os.path.join(folder, stems[near[0]])!r}?"] if near else []
