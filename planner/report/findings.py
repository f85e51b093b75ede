"""What a reader of a plan should not miss: what was found when it was made
(planner.search.findings), and what its file says by itself."""

from __future__ import annotations

from costmodels.hardware.units import show_bytes, show_time
from costmodels.precision import Recipe, load_recipe
from planner.errors import PlanError
from planner.graph.findings import Finding, ordered
from planner.machine.topology import from_json
from planner.report.baselines import TABLES, WITH_ROOM, pins_for, ties
from planner.strategy.stages import lockstep
from planner.strategy.strategy import GIVEN, Strategy
from planner.support.text import Style, hang, percent, short

DISTINCT = 0.995
"""Share of distinct work above which nothing is done twice, but for what rounding says."""


def experts_cut(strategy: Strategy) -> bool:
    """Whether experts lie on different devices, of which the busiest has more rows than the
    mean."""
    if not any(text.startswith("experts: ") for text in strategy.assumptions):
        return False  # as planner.ops.expert_load says of a graph: nothing is loaded to look closer
    from planner.ops.base import operator_of

    return any(
        axes and operator_of(row["op"]).roles.get(factor) == "expert"
        for row in strategy.nodes.values()
        for factor, axes in row["split"].items()
    )


def unsupported(strategy: Strategy) -> list[tuple[str, int, float]]:
    """(reason, nodes, seconds a step) per kind of operator that has no rule and so runs whole on
    every device."""
    sums: dict[str, tuple[int, float]] = {}
    for row in strategy.nodes.values():
        if row.get("unsupported"):
            n, s = sums.get(row["unsupported"], (0, 0.0))
            sums[row["unsupported"]] = (
                n + row.get("times", 1),
                s + row.get("time_s", 0.0) * int(strategy.techniques["microbatches"]),
            )
    return [(reason, n, s) for reason, (n, s) in sums.items()]


def findings(strategy: Strategy) -> list[Finding]:
    """What a reader should not miss, a sentence each, the gravest first."""
    listed = [Finding(str(row["kind"]), str(row["text"])) for row in strategy.findings]
    listed += _work_findings(strategy)
    listed += _memory_findings(strategy)
    listed += _operator_findings(strategy)
    listed += table_findings(strategy)
    padded = [name for name, row in strategy.tensors.items() if row.get("padded")]
    if padded:
        text = (
            f"{len(padded)} tensor{'s' if len(padded) > 1 else ''} padded to a multiple of"
            f" {'their' if len(padded) > 1 else 'its'} axes, first {short(padded[0], 40)}"
        )
        listed.append(Finding("padding", text))
    return list(ordered(listed))


def _work_findings(strategy: Strategy) -> list[Finding]:
    """That devices do the same arithmetic, where they do."""
    c, listed = strategy.costs, list[Finding]()
    if c["distinct_work"] < DISTINCT:
        rest = ["done twice", "on padding"]
        if lockstep(strategy):
            rest.append("on no microbatch (bubbles)")
        if experts_cut(strategy):
            rest.append("what the device of the busiest experts has beyond the mean")
        listed.append(
            Finding(
                "devices",
                f"devices doing distinct work: {percent(c['distinct_work'])}: the rest of the"
                f" arithmetic is {', '.join(rest[:-1])} or {rest[-1]}",
            )
        )
    return listed


def _memory_findings(strategy: Strategy) -> list[Finding]:
    """That memory is tight, or does not suffice."""
    c, listed = strategy.costs, list[Finding]()
    low, high = c["memory_range_bytes"]
    if c["fit"] == "tight":
        over = show_bytes(high - c["memory_limit_bytes"])
        listed.append(
            Finding(
                "memory",
                f"memory is tight: its range ends {over} above what is usable; {_safe(strategy)};"
                " plan verify asks the compiler",
            )
        )
    if c["fit"] == "no":
        perhaps = (
            "; the lower end of its range would: plan verify asks the compiler"
            if low <= c["memory_limit_bytes"]
            else ""
        )
        listed.append(
            Finding("memory", "this plan does not fit in the memory of a device" + perhaps)
        )
    return listed


FASTER_IN_FP16 = 1.5
"""From how many times the rate of bfloat16 on float16 is worth a word: GPUs before 2020 multiply
bfloat16 as they do float32."""


def _of_products(strategy: Strategy, recipe: Recipe) -> list[Finding]:
    """That a device has no units for products of the plan's type: nothing where its file is not
    here, as a strategy may be read anywhere."""
    try:
        device = from_json(strategy.topology).device
    except PlanError:
        return []
    times, text = device.peak("float16") / device.peak(recipe.compute), ""
    if recipe.compute == "bfloat16" and times > FASTER_IN_FP16:
        text = f"--precision fp16 multiplies {times:.2g} times as fast"
    elif recipe.compute != recipe.between and recipe.compute not in device.peak_flops_per_s:
        text = (
            f"they take as long as in {recipe.between}, and conversions come on top; --precision"
            " bf16-mixed is faster"
        )
    said = recipe.compute if recipe.compute == "bfloat16" else recipe.name
    none = f"{device.name} has no units for products in {said}: {text}"
    return [Finding("operators", none)] if text else []


def _operator_findings(strategy: Strategy) -> list[Finding]:
    """Precision that no program is emitted in, and operators without a rule."""
    c, listed = strategy.costs, list[Finding]()
    recipe = load_recipe(str(strategy.workload["precision"]))
    if not recipe.emitted and str(strategy.workload["runtime"]).startswith("jax"):
        listed.append(
            Finding(
                "operators",
                f"{recipe.name} is priced, not emitted: plan emit writes no program of this plan;"
                " --precision bf16-mixed is emitted",
            )
        )
    listed += _of_products(strategy, recipe)
    for reason, n, seconds in unsupported(strategy):
        share = f", {percent(seconds / c['step_time_s'])} of the step" if c["step_time_s"] else ""
        listed.append(
            Finding(
                "operators",
                f"{n} node{'s' if n > 1 else ''} whole on every device ({reason}):"
                f" {show_time(seconds)}{share}",
            )
        )
    return listed


def _safe(strategy: Strategy) -> str:
    """What a plan that fits with room costs, of one that fits tightly."""
    c, row = strategy.costs, strategy.baselines.get(WITH_ROOM)
    if row is None:
        searched = strategy.solver["name"] not in GIVEN and not strategy.solver.get("stopped")
        return (
            "no plan that was found fits with room"
            if searched
            else "a search takes one that fits with room, where there is one"
        )
    spare = show_bytes(max(0, c["memory_limit_bytes"] - row["memory_range_bytes"][1]))
    return (
        f"the safe plan: {100 * (row['step_time_s'] / c['step_time_s'] - 1):.3g} % slower, {spare}"
        f" to spare: --pin {pins_for(row)}"
    )


def table_findings(strategy: Strategy) -> list[Finding]:
    """What host memory the hosted tables take, or whether hosting them would pay."""
    c = strategy.costs
    listed: list[Finding] = []
    if c.get("host_memory_bytes"):
        n = len(strategy.techniques["hosted"])
        listed.append(
            Finding(
                "tables",
                f"{n} table{'s' if n > 1 else ''} with their optimizer state take"
                f" {show_bytes(c['host_memory_bytes'])} of the memory of all hosts together; rows"
                " that a step does not read keep their moments (docs/tables.md)",
            )
        )
    for key, name in TABLES.items():
        row = strategy.baselines.get(key)
        if row is not None and row["fit"] != "no" and not ties(c, row):
            ratio = c["step_time_s"] / row["step_time_s"]
            faster, slower = (
                (
                    f"{ratio:.2g} times as fast: plan again with --tables"
                    f" {key.removeprefix('tables_')}"
                ),
                f"{1 / ratio:.2g} times as slow: they stay on the devices",
            )
            sizes = (
                f"{show_bytes(row['memory_per_device_bytes'])} a device instead of"
                f" {show_bytes(c['memory_per_device_bytes'])}"
            )
            listed.append(
                Finding("tables", f"{name} would be {faster if ratio > 1 else slower}; {sizes}")
            )
    return listed


def finding_lines(strategy: Strategy, width: int, style: Style) -> list[str]:
    """The findings as lines of a terminal."""
    return [line for text in findings(strategy) for line in finding_line(text, width, style)]


def finding_line(text: str, width: int, style: Style) -> list[str]:
    """A finding, in as many lines as it takes."""
    first, *continued = hang("finding ", text, width)
    return [style.warn("finding ") + first.removeprefix("finding "), *continued]
