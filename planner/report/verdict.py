"""The verdict on a plan in one sentence: whether to run it, what it is better than and by how much,
whether it fits with room, and how good it is known to be.

Run this: 1.3 % faster than tensor 2 x data 4 + ZeRO-1, a tie; fits with 4.1 GiB to spare; proven
the best of the 22 meshes tried
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from costmodels.hardware.units import show_bytes
from planner.report.baselines import ON_DEVICES, TABLES, TIE, WITH_ROOM, baseline_name, ties
from planner.report.findings import DISTINCT, experts_cut
from planner.report.proof import covered
from planner.strategy.stages import lockstep
from planner.strategy.strategy import Strategy
from planner.support.text import percent

PLAIN = ("data_parallel", "zero3")
TIED, TIES = ", a tie within the model's error", ", ties within the model's error"
ALONE = 1.01
"""Devices' worth of distinct work up to which one device does as well."""
LEADS = {"import": "As configured"}
"""How the sentence begins of plans that were not searched for, by what their file names as
solver."""
OFTEN = 2.0
"""From here on steps are so many times as long, not so many percent longer."""


def verdict(s: Strategy) -> str:
    """The sentence that sums a plan up."""
    c, devices = s.costs, s.topology["devices"]
    lead = LEADS.get(s.solver["name"], "Run this")
    parts = [beside(s), fits(c), repeated(s), proof(s)]
    if c["fit"] == "no":
        lead, parts = "Do not run this", [fits(c), beside(s)]
    elif any(row["kind"] == "speed" for row in s.findings):
        lead = (
            f"Do not run this yet (MFU {percent(c['model_flops_utilization'])}: the first finding"
            " says why)"
        )
    elif devices > 1 and c["distinct_work"] * devices < ALONE:
        lead, parts = (
            "One device does as well",
            [f"all {devices:,} do the same work", fits(c), proof(s)],
        )
    return f"{lead}: {'; '.join(part for part in parts if part)}"


def beside(s: Strategy) -> str:
    """`1.3 % faster than ZeRO-3, a tie`: held against the fastest baseline that fits; "" where the
    file has none."""
    costs = s.costs
    rivals = {
        key: row
        for key, row in s.baselines.items()
        if key not in TABLES and key not in (WITH_ROOM, ON_DEVICES)
    }
    if not rivals or s.topology["devices"] < 2:
        return ""
    fitting = {key: row for key, row in rivals.items() if row["fit"] != "no"}
    if not fitting:
        none = "none of the usual ways fits" if costs["fit"] != "no" else ""
        kept = s.baselines.get(ON_DEVICES)
        if none and kept is not None and kept["fit"] != "no":
            return f"{against(costs, kept)} the best with all on the devices; {none}"
        return none
    key, row = min(fitting.items(), key=lambda kv: (kv[1]["step_time_s"], kv[0]))
    name = baseline_name(key, row)
    if s.solver.get("from") == key:
        return f"it is {name}, and nothing that was searched is notably faster"
    rows = [(name, row)]
    if key == "megatron" and (
        plain := {k: r for k, r in fitting.items() if k in PLAIN}
    ):  # what most would run
        rows += [
            (baseline_name(k, r), r)
            for k, r in [min(plain.items(), key=lambda kv: (kv[1]["step_time_s"], kv[0]))]
        ]
    tied = [ties(costs, r) for _, r in rows]
    phrases = [
        f"{against(costs, r)} {n}{_why_slower(s, r)}{', a tie' if t and not all(tied) else ''}"
        for (n, r), t in zip(rows, tied, strict=True)
    ]
    closed = [f"{phrase}," if ", " in phrase else phrase for phrase in phrases[:-1]]
    all_tied = "" if not all(tied) else TIED if len(rows) == 1 else TIES
    return f"{' and '.join([*closed, phrases[-1]])}{all_tied}"


def against(costs: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """`1.3 % faster than`, `2.4 times as fast as`, `as fast as`."""
    if not costs["step_time_s"]:
        return "as fast as"
    ratio = other["step_time_s"] / costs["step_time_s"]
    if abs(ratio - 1) < TIE:
        return "as fast as"
    if ratio >= OFTEN:
        return f"{ratio:.3g} times as fast as"
    return (
        f"{percent(ratio - 1)} faster than"
        if ratio > 1
        else (
            f"{percent(1 / ratio - 1)} slower than"
            if ratio > 1 / OFTEN
            else f"{1 / ratio:.3g} times as slow as"
        )
    )


def _why_slower(s: Strategy, row: Mapping[str, Any]) -> str:
    """What keeps the faster baseline from being the plan."""
    costs, provenance = s.costs, s.provenance
    if row["step_time_s"] >= costs["step_time_s"] * (1 - TIE):
        return ""
    if provenance.get("objective", "step") != "step":
        return f" (--objective {provenance['objective']})"
    what = (
        "pins"
        if "pins" in provenance
        else "mode"
        if provenance.get("mode", "auto") != "auto"
        else ""
    )
    if what:
        return f", which does not keep the {what}"
    return ", which is tight" if row["fit"] == "tight" and costs["fit"] == "yes" else ""


def fits(c: Mapping[str, Any]) -> str:
    """Whether a plan fits, and with how much room at the upper end of the range."""
    limit, high, need = (
        c["memory_limit_bytes"],
        c["memory_range_bytes"][1],
        c["memory_per_device_bytes"],
    )
    if c["fit"] == "yes":
        return f"fits with {show_bytes(max(0, limit - high))} to spare"
    if c["fit"] == "tight":
        return f"tight: it may need {show_bytes(max(0, high - limit))} more than is usable"
    return f"it does not fit: {show_bytes(max(0, need - limit))} too much"


def repeated(s: Strategy) -> str:
    """That devices repeat one another's work, where they do."""
    distinct = s.costs["distinct_work"]
    if distinct >= DISTINCT:
        return ""
    rest = [
        *(["bubbles"] if lockstep(s) else []),
        "padding",
        *(["the busiest experts' rows"] if experts_cut(s) else []),
    ]
    return f"{percent(distinct)} of the work is distinct, the rest {', '.join(rest)} or done twice"


def proof(s: Strategy) -> str:
    """How good the plan is known to be."""
    solver = s.solver
    if solver["name"] == "manual":
        return "priced as given"
    if solver["name"] == "import":
        return "no other plan was looked for"
    if solver["status"] == "optimal":
        return f"proven the best of {covered(solver)}{of_plans(s)}"
    until = {"time": "best when the time was up", "interrupt": "best when it was interrupted"}.get(
        solver.get("stopped", ""), "best found"
    )
    return (
        until
        if solver.get("gap") is None
        else (
            f"{until}, within {percent(solver['gap'])} of what is proven of"
            f" {covered(solver)}{of_plans(s)}"
        )
    )


def of_plans(s: Strategy) -> str:
    """` among plans that fit with room`, where the bound is of these alone."""
    return " among plans that fit with room" if s.solver.get("bound_memory_bytes") else ""
