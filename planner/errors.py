"""Errors for users: a code, what is wrong, where, the values, and the next step.

Bad input never shows a traceback: the command line prints `str(error)` and exits with `exit_code`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

USAGE, NO_PLAN = 2, 3
_EXPORT = "export the model again (docs/exporting.md has what is known to work)"
_SAVE = "save the model again, with its data beside it"
_KEYS = "docs/exchange.md says which keys are read"
NEXT_STEPS: Mapping[str, str] = {
    "P011": "--devices N, a whole number",
    "P012": "plan hardware NAME says in which numbers it comes",
    "P013": "docs/hardware.md shows a whole file",
    "P020": "docs/modes.md shows pins, as a list and as a file",
    "P035": "a batch that divides into them",
    "P036": "`plan ops FILE --parameters` lists the parameters",
    "P038": "docs/training.md says what a loss may be",
    "P054": "another path, or plan again: plan MODEL --devices N -o FILE",
    "P056": "room on the disk, or another folder",
    "P057": "undo the last edit of it, or plan again",
    "P065": "docs/continuous-integration.md shows a budget",
    "P101": "a file that you may read",
    **dict.fromkeys(("P102", "P110", "P111", "P112", "P113", "P114", "P116"), _EXPORT),
    "P115": "other sizes (--batch, --dim, --shape) where these do not fit, or " + _EXPORT,
    **dict.fromkeys(("P120", "P121", "P122"), "export the model without nested functions"),
    "P130": "export the model without it",
    **dict.fromkeys(("P131", "P132", "P134"), _SAVE),
    "P133": "a smaller --batch, --dim or --shape, or " + _EXPORT,
    "P135": "put the data into a file beside the model",
    "P136": "store it dense",
    "P140": "--dim NAME=VALUE for each name that it holds",
    "P141": "an input of the model",
    "P142": "give each of them once, with one value",
    "P143": "export the model without it",
    "P145": "--batch N, or a multiple of that length",
    "P190": _KEYS,
    "P191": f"another value, or --devices as many as it runs on; {_KEYS}",
    "P193": "plan annotate MODEL.plan.json --model MODEL writes annotations that are read",
    "P212": "a checkpoint of a wider type, or values of a run that did not diverge",
}
"""Code -> the next step of errors that say none of their own."""


class PlanError(Exception):
    """`error[CODE]: what`, then indented `detail` lines (file, node, values), then `help:` lines.

    Args:
        code: "P001"-style, stable across releases; listed in docs/errors.md.
        what: one sentence that names the thing and its values.
        detail: where (file, node, tensor) and the values, a line each.
        help: next steps, a line each; only options that exist. None: that of the code
            (NEXT_STEPS).
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
            tuple(help) or ((NEXT_STEPS[code],) if code in NEXT_STEPS else ()),
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


def closest(name: str, known: Sequence[str], cutoff: float = 0.6) -> str:
    """The first name that goes on from what was typed, else the closest, '' when nothing is close
    (cutoff: how close, of 1; of names of two letters one is enough)."""
    import difflib

    cutoff = cutoff if len(name) >= SHORTEST else min(cutoff, 0.5)
    close = [
        k for k in known if len(name) >= SHORTEST and k.startswith(name)
    ] or difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return close[0] if close else ""


def did_you_mean(name: str, known: Sequence[str], cutoff: float = 0.6) -> str:
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
