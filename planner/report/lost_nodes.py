"""`plan explain --without` and `--slow`: what a node costs that is missing, or slower than the
others (planner.whatif.lost_nodes)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from costmodels.hardware.units import show_bytes, show_time
from planner.report.summary import machine, title
from planner.report.tables import mesh_words, technique_words
from planner.strategy.strategy import Strategy
from planner.support.text import Style, fitted, hang, percent

if TYPE_CHECKING:
    from planner.whatif.lost_nodes import LostNodes, Without


UNPINNED = (
    "the plan's pins have no place on the devices left, which are planned without them: a shorter"
    " step there is what the pins cost, not what the node does"
)


def lost_nodes_text(s: Strategy, lost: LostNodes, width: int = 100, colour: bool = False) -> str:
    """A row for today's step, one for a slow node, one for each way to go on without."""
    style = Style(colour)
    rows = [["", "devices", "step", "relative", "work kept", "memory", "the plan then"]]
    today = show_bytes(lost.today_bytes)
    rows.append(_row(lost, "all nodes", lost.devices, lost.today_s, today, "as it is"))
    named = _named(lost.nodes)
    if lost.slow is not None:
        share, seconds = lost.slow
        label = f"{named} at {percent(share)}"
        rows.append(_row(lost, label, lost.devices, seconds, today, "as it is: all wait"))
    for remaining in lost.without:
        label = f"without {named}"
        if remaining.plan is None:
            rows.append([label, f"{remaining.devices:,}", "-", "", "", "", remaining.refused])
            continue
        c = remaining.plan.costs
        memory = show_bytes(c["memory_per_device_bytes"])
        rows.append(
            _row(lost, label, remaining.devices, c["step_time_s"], memory, _plan_words(remaining))
        )
    head = f"{title(s)} on {machine(s)}: {show_time(lost.today_s)} a step"
    notes = [
        "the same batch in every row; work kept: samples a second, of those with all nodes",
        *([UNPINNED] if any(remaining.unpinned for remaining in lost.without) else []),
        *([_advice(lost)] if lost.slow is not None else []),
    ]
    return "\n".join(
        [
            *(style.bold(line) for line in hang("", head, width)),
            *fitted(rows, width, (1, 2, 3, 4, 5)),
            *(style.dim(line) for note in notes for line in hang("", note, width)),
        ]
    )


def _row(
    lost: LostNodes, label: str, devices: int, seconds: float, memory: str, plan: str
) -> list[str]:
    ratio = seconds / lost.today_s
    return [
        label,
        f"{devices:,}",
        show_time(seconds),
        f"{ratio:.2f}x",
        percent(1 / ratio),
        memory,
        plan,
    ]


def _plan_words(one: Without) -> str:
    assert one.plan is not None
    words = mesh_words(dict(one.plan.mesh_shape)) + technique_words(one.plan.techniques)
    pins_text = ", its pins kept" if one.pinned else ", without its pins" if one.unpinned else ""
    return words + pins_text


def _named(nodes: tuple[int, ...]) -> str:
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"


def _advice(lost: LostNodes) -> str:
    """Whether to wait for a slow node or to leave it out."""
    best, (node, *_) = lost.best, lost.nodes
    assert lost.slow is not None
    share, seconds = lost.slow
    if best is None or best.step_s is None:
        return "there is no plan without it: every step waits for it"
    bound = (
        f"it is better left out at any speed below the others', with {best.devices:,} devices left"
        if lost.pays_below >= 1
        else f"below about {percent(lost.pays_below)} of its speed a step without it is shorter"
    )
    keep = seconds <= best.step_s
    return f"{'wait for' if keep else 'leave out'} node {node} at {percent(share)}: {bound}"


def lost_nodes_json(lost: LostNodes) -> dict[str, Any]:
    """What lost nodes cost as a table for scripts, in seconds and bytes."""
    without = [
        {
            "devices": w.devices,
            "step_time_s": w.step_s,
            **(
                {
                    "mesh": dict(w.plan.mesh_shape),
                    "techniques": dict(w.plan.techniques),
                    "memory_per_device_bytes": w.plan.costs["memory_per_device_bytes"],
                    "pins_kept": w.pinned,
                }
                if w.plan is not None
                else {"refused": w.refused}
            ),
        }
        for w in lost.without
    ]
    slow = (
        {
            "slow": {"share": lost.slow[0], "step_time_s": lost.slow[1]},
            "leave_out_below": lost.pays_below,
        }
        if lost.slow is not None
        else {}
    )
    return {
        "nodes": list(lost.nodes),
        "nodes_of_machine": lost.of,
        "devices": lost.devices,
        "step_time_s": lost.today_s,
        "memory_per_device_bytes": lost.today_bytes,
        "without": without,
        **slow,
    }
