"""The ONNX project's own backend suite over `planner.onnx_backend`, with the suite's own comparison
and tolerances.

    python -m benchmarks.onnx_backend [--kind node] [--match REGEX] [--slowest 10]

Prints passes by kind, how they were run ("graph": the whole model by the statements of an emitted
program; "nodes": one node at a time, kernels of programs where they exist), and every case that
does not pass, by reason. Exits with 1 when a mark is missed. No downloads: the light models'
weights and expected outputs ship with onnx.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import sys
import tempfile
import time
import unittest
import warnings
from dataclasses import dataclass
from typing import Any

from planner.onnx_backend import Backend, Prepared

MARKS = {"node": 1600, "light": 9}
KINDS = {
    "node": "NodeModel",
    "simple": "SimpleModel",
    "pytorch-operator": "PyTorchOperatorModel",
    "pytorch-converted": "PyTorchConvertedModel",
    "light": "RealModel",
}
DRAWS = frozenset(
    {
        "Bernoulli",
        "Dropout",
        "Multinomial",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
    }
)
CLEAR_EVERY = 100
"""Cases between clearings of jax's compilation cache."""


@dataclass(frozen=True)
class Outcome:
    """One case: kind, name, "ok", how it was run, why it did not pass, and seconds."""

    kind: str
    name: str
    ok: bool
    way: str
    reason: str
    time_s: float


class Observed(Backend):
    """The backend, remembering the model it prepared last."""

    last: Prepared | None = None

    @classmethod
    def prepare(cls, model: Any, device: str = "CPU", **kwargs: Any) -> Prepared:
        """See Backend.prepare."""
        cls.last = super().prepare(model, device, **kwargs)
        return cls.last


def draws(model: Any) -> bool:
    """Whether a model's results are random: a graph or function of it draws numbers (Dropout only
    in training mode)."""
    nodes = [*model.graph.node, *(n for f in model.functions for n in f.node)]
    return any(n.op_type in DRAWS and (n.op_type != "Dropout" or len(n.input) > 2) for n in nodes)


def reason_of(error: BaseException, model: Any) -> str:
    """A line that says why a case did not pass."""
    if model is not None and draws(model):
        return "draws random numbers: nothing to compare with"
    text = " ".join(str(error).split())
    if isinstance(error, AssertionError):
        return f"differs: {text[:90]}"
    return f"{type(error).__name__}: {text[:160]}"


def run_case(kind: str, name: str, case: unittest.TestCase) -> Outcome:
    """Runs one case of the suite."""
    Observed.last = None
    start = time.perf_counter()
    error: BaseException | None = None
    try:
        getattr(case, name)()
    except Exception as found:  # whatever a case raises is its outcome
        error = found
    spent_s = time.perf_counter() - start
    last: Prepared | None = Observed.last
    way = last.way if last is not None else ""
    return Outcome(
        kind,
        name.removesuffix("_cpu"),
        error is None,
        way,
        reason_of(error, last.model if last else None) if error else "",
        spent_s,
    )


def run_suite(kinds: list[str], match: str = "", progress: bool = False) -> list[Outcome]:
    """Outcomes of every case of the kinds whose name matches, in the suite's order."""
    import jax

    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as home, warnings.catch_warnings():
        os.environ["ONNX_HOME"] = home
        warnings.simplefilter("ignore")
        from onnx.backend.test import BackendTest

        classes = BackendTest(Observed).test_cases
        for kind in kinds:
            case = classes[f"OnnxBackend{KINDS[kind]}Test"]()
            names = [
                n
                for n in dir(case)
                if n.startswith("test_") and n.endswith("_cpu") and re.search(match, n)
            ]
            for k, name in enumerate(names):
                outcomes.append(run_case(kind, name, case))
                if k % CLEAR_EVERY == CLEAR_EVERY - 1:
                    jax.clear_caches()
                    if progress:
                        print(f"{kind} {k + 1}/{len(names)}", file=sys.stderr, flush=True)
    return outcomes


def report(outcomes: list[Outcome]) -> list[str]:
    """The table by kind, then every reason with its cases."""
    lines = [f"{'kind':18} {'cases':>6} {'passed':>7} {'as graph':>9} {'by nodes':>9} {'not':>5}"]
    for kind in dict.fromkeys(o.kind for o in outcomes):
        own = [o for o in outcomes if o.kind == kind]
        good = [o for o in own if o.ok]
        ways = collections.Counter(o.way for o in good)
        lines.append(
            f"{kind:18} {len(own):6} {len(good):7} {ways['graph']:9} {ways['nodes']:9}"
            f" {len(own) - len(good):5}"
        )
    reasons: dict[tuple[str, str], list[str]] = {}
    for o in outcomes:
        if not o.ok:
            reasons.setdefault((o.kind, o.reason), []).append(o.name)
    for (kind, reason), names in sorted(
        reasons.items(), key=lambda item: (item[0][0], -len(item[1]), item[0][1])
    ):
        lines += ["", f"{kind}: {len(names)} x {reason}", *(f"    {n}" for n in names)]
    return lines


def missed(outcomes: list[Outcome]) -> list[str]:
    """Marks that the outcomes miss."""
    found = []
    for kind in dict.fromkeys(o.kind for o in outcomes):
        own = [o for o in outcomes if o.kind == kind]
        passed, mark = sum(o.ok for o in own), MARKS.get(kind, len(own))
        if passed < mark:
            found.append(f"{kind}: {passed} of {len(own)}, mark {mark}")
    return found


def main() -> int:
    """Runs the suite and prints the report."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.onnx_backend",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--kind", choices=list(KINDS), action="append", help="only this kind (may be repeated)"
    )
    parser.add_argument("--match", default="", help="only cases whose name matches")
    parser.add_argument("--slowest", type=int, default=0, help="list the slowest cases")
    args = parser.parse_args()
    start = time.process_time()
    outcomes = run_suite(args.kind or list(KINDS), args.match, progress=True)
    print("\n".join(report(outcomes)))
    print(f"\n{time.process_time() - start:.0f} CPU seconds")
    for o in sorted(outcomes, key=lambda o: -o.time_s)[: args.slowest]:
        print(f"{o.time_s:7.2f} s  {o.name}")
    lost = missed(outcomes) if not args.match else []
    for line in lost:
        print(f"mark missed: {line}")
    return bool(lost)


if __name__ == "__main__":
    sys.exit(main())
