"""Command lines whose mistakes are errors with a next step."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NoReturn

from planner.errors import PlanError, did_you_mean

LISTS = ("LIST", "NAME,...")
"""What options that hold several values, parted by commas, are called to take."""


class _Once(argparse._StoreAction):
    """An option that holds one value: a second one that differs is a mistake, not a correction, and
    so is an empty one, such as a variable of a script that was never set."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Take the value."""
        if self.option_strings and values == "":
            raise PlanError(
                "P003",
                f"{option_string} is empty",
                help=[f"{option_string} {self.metavar or 'VALUE'}, or leave it out"],
            )
        seen = parser.given if isinstance(parser, Parser) else {}
        if self.option_strings and seen.setdefault(self.dest, values) != values:
            raise PlanError(
                "P003",
                f"{option_string} is given twice, {seen[self.dest]} and {values}",
                help=[self._instead(seen[self.dest], values)],
            )
        super().__call__(parser, namespace, values, option_string)

    def _instead(self, *values: Any) -> str:
        """What to type in place of two of them."""
        lists = isinstance(self.metavar, str) and self.metavar in LISTS
        return "leave one of them" + (
            f", or {self.option_strings[0]} {','.join(map(str, values))}" if lists else ""
        )


class Parser(argparse.ArgumentParser):
    """Usage errors become PlanErrors; an unknown option gets a suggestion."""

    def __init__(
        self, prog: str, about: str, example: str, meant: Callable[[str], str] = lambda word: ""
    ) -> None:
        """meant: how an option that planning commands lack is typed for them; "" for none."""
        super().__init__(
            prog=prog,
            description=about,
            epilog=example,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.meant = meant
        self.given: dict[str, Any] = {}
        for name in (None, "store"):
            self.register("action", name, _Once)

    def error(self, message: str) -> NoReturn:
        """argparse's message as a PlanError."""
        raise PlanError("P003", message.removeprefix("argument "), help=[f"{self.prog} --help"])

    def _meant(self, word: str) -> str:
        """What `word` might have been meant to say, of commands that plan."""
        plans = "--pin" in self._option_string_actions and word.startswith("-")
        return self.meant(word) if plans else ""

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse; unknown options are named before anything else is complained about. A verb with
        `arguments` hands on what follows --."""
        passed = (
            list(argv)[list(argv).index("--") + 1 :]
            if self.get_default("arguments") is not None and "--" in argv
            else None
        )
        if passed is not None:
            argv = list(argv)[: list(argv).index("--")]
        known = list(self._option_string_actions)
        words = list(argv[: list(argv).index("--")] if "--" in argv else argv)
        for word, after in pairwise([*words, "-"]):
            name = word.partition("=")[0]
            if name.startswith("--") and name not in known:
                valued = word if "=" in word or after.startswith("-") else f"{word}={after}"
                near = self._meant(valued) or did_you_mean(
                    name, [k for k in known if k != "--help"]
                )
                raise PlanError(
                    "P002",
                    f"`{self.prog}` has no option {name}",
                    help=[h for h in (near, f"{self.prog} --help lists the options") if h],
                )
        self.given.clear()
        args, extra = self.parse_known_intermixed_args(
            list(argv)
        )  # positionals may stand on both sides of an option
        if extra:
            raise PlanError(
                "P002",
                f"`{self.prog}` does not understand {' '.join(extra)!r}",
                help=[h for h in (self._meant(extra[0]), f"{self.prog} --help") if h],
            )
        if passed is not None:
            args.arguments = tuple(passed)
        return args
