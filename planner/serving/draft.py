"""Speculative decoding: from which acceptance on a draft model pays.

Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023.

A small model drafts g tokens one by one, each at c of a step's seconds; the model then passes them
all at once, at v(g) of a step's seconds, and takes those before the first that it would not have
drawn, and one of its own. With a the chance that a drafted token is taken, an iteration gives
(1 - a^(g + 1)) / (1 - a) tokens in g c + v(g) steps' time. The paper has v = 1, which holds where a
step waits for memory; here v is the price of so many rows under the plan, so that what pays for a
few sequences need not pay for many.
"""

from __future__ import annotations

from typing import Any

from planner.errors import PlanError
from planner.pins.pins import Pins
from planner.serving.cached import form_of
from planner.serving.continuous import StepPrices
from planner.serving.joint import NO_TECHNIQUES, Joint
from planner.serving.sizes import Sizes
from planner.serving.step_prices import PlanPrices

DRAFTED = range(1, 9)
"""Tokens that are drafted at a time, what is tried."""
SHOWN = (0.6, 0.7, 0.8, 0.9)
"""Acceptances whose gain is said."""
HALVINGS = 50


def tokens(acceptance: float, drafted: int) -> float:
    """Tokens of an iteration in the mean."""
    return sum(acceptance**k for k in range(drafted + 1))


def gain(acceptance: float, drafted: int, cost: float, verify: float) -> float:
    """How many times as fast it generates."""
    return tokens(acceptance, drafted) / (drafted * cost + verify)


def break_even(drafted: int, cost: float, verify: float) -> float | None:
    """The acceptance from which so many drafted tokens pay; None where none is enough."""
    if gain(1.0, drafted, cost, verify) <= 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if gain(middle, drafted, cost, verify) > 1 else (middle, high)
    return high


def figures(prices: StepPrices, sequences: int, length: int, draft_s: float) -> dict[str, Any]:
    """What is said of a draft whose step takes so long, beside steps of so many sequences of a
    replica with so many tokens each."""
    base_s, key_s = prices.decode(sequences)
    keys_s = key_s * sequences * length
    step_s = base_s + keys_s
    cost = draft_s / step_s
    verify = {
        g: max(1.0, (prices.prompt(sequences * (g + 1))[0] + keys_s) / step_s) for g in DRAFTED
    }
    least = [a for g in DRAFTED if (a := break_even(g, cost, verify[g])) is not None]
    rows = []
    for acceptance in SHOWN:
        g = max(DRAFTED, key=lambda g: gain(acceptance, g, cost, verify[g]))
        rows.append(
            {"acceptance": acceptance, "drafted": g, "gain": gain(acceptance, g, cost, verify[g])}
        )
    return {
        "cost": cost,
        "sequences": sequences,
        "break_even": min(least, default=None),
        "verify": {str(g): v for g, v in verify.items()},
        "gains": rows,
    }


def step_s(joint: Joint, mesh: tuple[int, int], sequences: int, length: int) -> float:
    """Seconds of a draft model's step, cut by tensor parallelism as wide as the model's. mesh:
    replicas and devices of each. Raises PlanError P226 where it cannot be cut so."""
    pins = Pins(joint.axes(*mesh), {**NO_TECHNIQUES, "tensor": "megatron"})
    pair = joint.held("draft", pins, *mesh)
    if pair is None:
        raise PlanError(
            "P226",
            f"--draft: no tensor parallelism of {mesh[1]} devices for the draft, as the model has",
            help=["another draft", "its step as a share of the model's: --draft 0.05"],
        )
    prices = PlanPrices.of(Sizes(joint, length, joint.step.service.prompt), pair)
    base_s, key_s = prices.decode(sequences)
    return base_s + key_s * sequences * length


def refuse_states(model: Any) -> None:
    """Raises PlanError P222 for a model whose layers keep states."""
    if form_of(model.proto, model.name, model.workload.dims).constant:
        raise PlanError(
            "P222",
            f"--draft: {model.name} keeps states, out of which tokens that are drafted and not"
            " taken would have to be taken back: what that costs is not priced",
            help=["plan without --draft"],
        )


def draft_of(text: str | float) -> str | float:
    """The value of --draft: a share of the model's step, or a model. Raises PlanError P226."""
    try:
        share = float(text)
    except ValueError:
        return str(text)
    if not 0 < share < 1:
        raise PlanError(
            "P226",
            f"--draft {text}: a draft's step takes a share of the model's, above 0 and below 1",
            help=["--draft 0.05, or a model: --draft zoo:NAME,cache=1"],
        )
    return share
