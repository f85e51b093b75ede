"""A serving plan: two strategies over one layout of the weights, what they were weighed against,
and the file that keeps them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from costmodels.hardware.intake import opened, read_json
from costmodels.hardware.units import show_bytes
from costmodels.runtimes import ENGINES
from planner.errors import PlanError
from planner.strategy.read import checked
from planner.strategy.strategy import FORMAT_VERSION, Strategy, _plain
from planner.support.atomic_write import write_atomically
from planner.support.text import LONGEST, short

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
TRAFFIC = (
    "requests",
    "longest",
    "seed",
    "rate_per_s",
    "most_per_s",
    "stable",
    "attained",
    "tokens_per_s",
    "waiting",
    "most_waiting",
    "generating",
    "busy",
    "cache_taken",
    "block_waste",
)
"""Numbers that are said of requests that arrive."""
MOST = 1e100
"""No number that a file says is above it."""
POOLS = ("prefill", "decode")
UNIT = ("replicas", "split", "per_s", "sequences", "step_tokens")
"""Numbers that are said of a kind of replicas that do one phase."""
LOADED = ("most_per_s", "ttft_p99_s", "tpot_p99_s")
"""What rows say under requests that arrive."""
PERCENTILES = (50, 90, 99)
"""Of times, what is said of them: p50 is what half the requests wait at most."""
OBJECTIVES = ("throughput", "ttft", "tpot")
"""What may be sought: tokens a second, seconds to the first tokens, seconds a token after them."""


@dataclass(frozen=True)
class Service:
    """What is served: sequences at once, tokens of a prompt and tokens generated for each;
    quantize: "none", "int8" or (of --precision fp8) "fp8"; wave: sequences whose prompts are passed
    at once (0: all); cache_type: "compute" (as is computed) or "fp8"; engine: what serves, "" for
    the emitted program."""

    prompt: int
    generate: int
    concurrency: int
    quantize: str = "none"
    wave: int = 0
    cache_type: str = "compute"
    engine: str = ""

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
    """service: what is served (prompt, generate, concurrency, objective, quantize, where it is not
    as computed cache_type, most_sequences:
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
    traffic: Mapping[str, Any] | None = None
    """Of requests that arrive, what becomes of them (planner.serving.traffic); the phases are then
    those of as many sequences as are let in, of mean lengths."""

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
            str(s.get("cache_type", "compute")),
            str(s.get("engine", "")),
        )

    def to_json(self) -> str:
        """The file's text."""
        plain = {
            "format_version": FORMAT_VERSION,
            "service": _plain(self.service),
            "figures": _plain(self.figures),
            "rows": _plain(self.rows),
            "provenance": _plain(self.provenance),
            **({"traffic": _plain(self.traffic)} if self.traffic else {}),
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
            serving = cls(
                data["service"],
                data["figures"],
                tuple(data["rows"]),
                prompts,
                step,
                data["provenance"],
                data.get("traffic"),
            )
            serving.shape  # noqa: B018
            [row[k] for row in (serving.figures, *serving.rows) for k in FIGURES]
            _check_numbers(
                "figures", [r.get("state_bytes", 0) for r in (serving.figures, *serving.rows)]
            )
            _check_service(serving.service, serving.rows)
            _check_traffic(serving.traffic, serving.rows)
            _check_draft(serving.service.get("draft"))
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise PlanError(
                "P057",
                f"{path} is not a usable serving plan: {type(e).__name__} {str(e)[:60]}",
                help=["plan again, or undo the last edit of the file"],
            ) from e
        return serving

    def __str__(self) -> str:
        return PRINTERS[-1](self) if PRINTERS else f"serving plan of {self.step.model['name']}"


def _check_service(service: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Raises TypeError or ValueError where what is served, or what was priced, is not usable."""
    _check_numbers("service", [service["most_sequences"]])
    if service.get("engine", "") not in ("", *ENGINES):
        raise ValueError(f"service: engine {str(service['engine'])[:20]!r}")
    if service["objective"] not in OBJECTIVES:
        raise ValueError(f"service: objective {str(service['objective'])[:20]!r}")
    if not all(isinstance(row["label"], str) for row in rows):
        raise TypeError("rows: a label that is no text")


def _check_numbers(where: str, values: Sequence[Any]) -> None:
    """Raises TypeError for what is no number, ValueError for one that counts nothing."""
    if not all(isinstance(n, int | float) for n in values):
        raise TypeError(f"{where}: not a number")
    if not all(0 <= n <= MOST for n in values):
        raise ValueError(f"{where}: a number below 0, or above {MOST:g}")


def _check_traffic(traffic: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Raises KeyError, TypeError or ValueError where what is said of requests is not usable."""
    if traffic is None:
        if any("units" in row or "pools" in row for row in rows):
            raise ValueError("pools without requests that arrive")
        return
    numbers = [traffic[name] for name in TRAFFIC]
    numbers += [traffic[t][f"p{p}"] for t in ("ttft_s", "tpot_s") for p in PERCENTILES]
    numbers += [traffic["limits"][k] for k in ("sequences", "step_tokens", "cache_tokens", "block")]
    numbers += [row[k] for row in rows for k in LOADED]
    units = [u for row in rows if "units" in row for u in (row["units"][k] for k in POOLS)]
    numbers += [u[k] for u in units for k in UNIT]
    words = [traffic[name] for name in ("source", "prompt", "generate")]
    for target in traffic["targets"]:
        numbers += [target["percentile"], target["seconds"]]
        words.append(target["figure"])
        if len(target) > len(("figure", "percentile", "seconds")):
            raise ValueError("traffic: a target says more than a target does")
        traffic[f"{target['figure']}_s"][f"p{target['percentile']}"]
    if "pools" in traffic:
        pools = traffic["pools"]
        units += [pools[kind] for kind in POOLS]
        numbers += [pools[kind][k] for kind in POOLS for k in (*UNIT, "busy")]
        numbers += [pools["transfer"][k] for k in ("bytes_per_token", "mean_s", "busy")]
        numbers.append(pools["transfer"].get("bytes_per_sequence", 0))
        words.append(pools["transfer"]["link"])
    words += [unit["label"] for unit in units]
    if "fewer" in traffic:
        numbers.append(traffic["fewer"]["devices"])
        words.append(traffic["fewer"]["why"])
    _check_numbers("traffic", numbers)
    if not traffic["most_per_s"]:
        raise ValueError("traffic: no request is served")
    if not all(isinstance(w, str) for w in words):
        raise TypeError("traffic: not a text")
    if [row["chosen"] for row in rows].count(True) != 1:
        raise ValueError("traffic: not one row is the plan's")


def _check_draft(draft: Any) -> None:
    """Raises KeyError or TypeError where what is said of a draft is not usable."""
    if draft is None:
        return
    numbers = [draft["cost"], draft["sequences"], draft["verify"]["1"]]
    numbers += [row[k] for row in draft["gains"] for k in ("acceptance", "drafted", "gain")]
    if draft["break_even"] is not None:
        numbers.append(draft["break_even"])
    _check_numbers("draft", numbers)


def pools_of(serving: Serving) -> Mapping[str, Any]:
    """What is said of both kinds of replicas where prompts and generation are on devices apart;
    else nothing."""
    return (serving.traffic or {}).get("pools", {})


def rate_words(per_s: float, digits: int = 3) -> str:
    """Requests a second, to so many digits or whole."""
    return f"{per_s:.{digits}g}" if per_s < 1000 else f"{per_s:,.0f}"


def replicas_words(replicas: int, split: int) -> str:
    """`4 replicas of 2 devices`."""
    return f"{replicas} replica{'s' * (replicas > 1)} of {split} device{'s' * (split > 1)}"


def sequences_words(n: int) -> str:
    """`64 sequences`."""
    return f"{n:,} sequence{'s' * (n > 1)}"


def together_words(s: Service) -> str:
    """`64 sequences at once, 2,048 + 256 tokens each`."""
    each_word = " each" * (s.concurrency > 1)
    lengths = f"{s.prompt:,} + {s.generate:,} tokens{each_word}"
    return f"{sequences_words(s.concurrency)} at once, {lengths}"


def kept_words(figures: Mapping[str, Any]) -> str:
    """`cache 3.1 GiB, state 2.0 GiB`, of those that there are."""
    kept = {"cache": figures["cache_bytes"], "state": figures.get("state_bytes", 0)}
    parts = [f"{name} {show_bytes(size)}" for name, size in kept.items() if size]
    return ", ".join(parts) or "cache 0 B"


def arriving(traffic: Mapping[str, Any]) -> str:
    """The requests, in words."""
    prompt, generate, source = (
        short("".join(c for c in traffic[k] if c.isprintable()), LONGEST)
        for k in ("prompt", "generate", "source")
    )
    each_s = rate_words(traffic["rate_per_s"], 4)
    rate = f"{each_s} requests a second of {prompt} + {generate} tokens"
    if source == "poisson":
        return f"{rate}, at random (seed {traffic['seed']})"
    return f"{traffic['requests']:,} requests of {source}, {rate}"


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
