"""A serving plan: two strategies over one layout of the weights, what they were weighed against,
and the file that keeps them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from costmodels.hardware.intake import opened, read_json
from planner.errors import PlanError
from planner.strategy.read import checked
from planner.strategy.strategy import FORMAT_VERSION, Strategy, _plain
from planner.support.atomic_write import write_atomically

MARK = '{\n  "kind": "serving",'
"""How the file of a serving plan begins: so it is told from others without reading it all."""
FIGURES = (
    "replicas",
    "split",
    "wave",
    "ttft_s",
    "tpot_s",
    "tokens_per_s_per_device",
    "memory_bytes",
    "cache_bytes",
    "weights_bytes",
    "fits",
)
OBJECTIVES = ("throughput", "ttft", "tpot")
"""What may be sought: tokens a second, seconds to the first tokens, seconds a token after them."""


@dataclass(frozen=True)
class Service:
    """What is served: sequences at once, tokens of a prompt and tokens generated for each;
    quantize: "none" or "int8"; wave: sequences whose prompts are passed at once (0: all)."""

    prompt: int
    generate: int
    concurrency: int
    quantize: str = "none"
    wave: int = 0

    @property
    def at_once(self) -> int:
        """Sequences of a pass over prompts."""
        return self.wave or self.concurrency

    @property
    def length(self) -> int:
        """Tokens that a cache has room for."""
        return self.prompt + self.generate


@dataclass(frozen=True)
class Serving:
    """service: what is served (prompt, generate, concurrency, objective, quantize, most_sequences:
    the greatest concurrency that fits). figures: of the plan.

    rows: everything that was priced, with its label and whether it is on the front of (ttft, tpot,
    tokens/s/device). prompts, step: the two strategies.
    """

    service: Mapping[str, Any]
    figures: Mapping[str, Any]
    rows: tuple[Mapping[str, Any], ...]
    prompts: Strategy
    step: Strategy
    provenance: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def shape(self) -> Service:
        """Prompt, tokens generated and sequences."""
        s = self.service
        return Service(
            int(s["prompt"]),
            int(s["generate"]),
            int(s["concurrency"]),
            str(s["quantize"]),
            int(self.figures["wave"]),
        )

    def to_json(self) -> str:
        """The file's text."""
        plain = {
            "format_version": FORMAT_VERSION,
            "service": _plain(self.service),
            "figures": _plain(self.figures),
            "rows": _plain(self.rows),
            "provenance": _plain(self.provenance),
        }
        body = json.dumps(plain, sort_keys=True, indent=2).removeprefix("{\n").removesuffix("\n}")
        parts = ",\n".join(
            f'  "{name}": {s.to_json().rstrip()}'
            for name, s in (("prompts", self.prompts), ("step", self.step))
        )
        return f"{MARK}\n{body},\n{parts}\n}}\n"

    def save(self, path: str | Path) -> None:
        """Write the file whole or not at all."""
        write_atomically(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Serving:
        """Read a file. Raises PlanError P054, P055 or P057 for one that is no serving plan of this
        version."""

        data = read(path)
        try:
            prompts, step = (
                checked(Strategy.from_dict(data[k], path), path) for k in ("prompts", "step")
            )
            made = cls(
                data["service"],
                data["figures"],
                tuple(data["rows"]),
                prompts,
                step,
                data["provenance"],
            )
            made.shape  # noqa: B018
            [row[k] for row in (made.figures, *made.rows) for k in FIGURES]
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise PlanError(
                "P057",
                f"{path} is not a usable serving plan: {type(e).__name__} {str(e)[:60]}",
                help=["plan again, or undo the last edit of the file"],
            ) from e
        return made

    def __str__(self) -> str:
        return PRINTERS[-1](self) if PRINTERS else f"serving plan of {self.step.model['name']}"


PRINTERS: list[Callable[[Serving], str]] = []
"""How a serving plan is shown in words: planner.serving, which has the report too, says so."""


def read(path: str | Path) -> dict[str, Any]:
    """The content of a plan's file. Raises PlanError P054."""
    try:
        data = read_json(path)
    except OSError as e:
        raise PlanError("P054", f"cannot read {str(path)!r}: {e.strerror}") from e
    except ValueError as e:
        raise PlanError("P054", f"{path} is not JSON: {e}") from e
    return data if isinstance(data, dict) else {}


def is_serving(path: str | Path) -> bool:
    """Whether a file is a serving plan; what is no file at all is left to who reads it."""
    try:
        with opened(path) as file:
            return file.read(len(MARK)) == MARK.encode()
    except OSError:
        return False
