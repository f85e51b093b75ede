"""`plan calibrate`: a device file measured here, or one that has learned from runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from planner.errors import PlanError
from planner.support import console

if TYPE_CHECKING:
    from planner.calibrate.fit import LinkFit


def run(args: argparse.Namespace) -> int:
    """Measure or learn, say what came out, write the file."""
    target = Path(args.output)
    if target.exists() and not args.force:
        raise PlanError("P053", f"{target} exists", help=["-o another file, or --force"])
    if args.runs:
        measuring = [
            name
            for name, value in (
                ("--devices", args.devices),
                ("--node-size", args.node_size),
                ("--quick", args.quick),
            )
            if value
        ]
        if measuring:
            raise PlanError(
                "P182",
                f"--runs measures nothing here: {measuring[0]} says nothing to it",
                help=["leave it out"],
            )
        return _learn(args, target)
    return _measure(args, target)


def _measure(args: argparse.Namespace, target: Path) -> int:
    from costmodels.hardware.describe import describe
    from planner.calibrate.fit import fit
    from planner.calibrate.measure import measure
    from planner.calibrate.profile import shipped_name, table, text
    from planner.machine.topology import device
    from planner.support.atomic_write import write_atomically

    measured = measure(args.devices, args.node_size, args.quick, console.say)
    base = device(args.hardware or shipped_name(measured.device))
    figures = fit(measured.samples, measured.kind, measured.devices, measured.node_size)
    content = text(
        table(figures, measured, base, target.stem),
        f"Measured by `plan calibrate`; docs/calibrate.md says how. {len(measured.samples)}"
        " samples.",
    )
    write_atomically(target, content)
    console.data(describe(device(str(target)), console.width()))
    for name, link in (("inner", figures.inner), ("outer", figures.outer)):
        if link:
            console.say(_link_line(name, link))
    console.say(
        f"wrote {target}   next: plan MODEL --devices {measured.devices} --hardware {target}"
    )
    return 0


def _link_line(name: str, link: LinkFit) -> str:
    off = ", ".join(f"{kind} {x:.0%}" for kind, x in link.off.items())
    return f"{name} link as a {link.kind}: collectives are typically off by {off}"


def _learn(args: argparse.Namespace, target: Path) -> int:
    from planner.calibrate.learn import learn, prepared, read, table
    from planner.calibrate.profile import text
    from planner.support.atomic_write import write_atomically

    rows, left_out = prepared(read(Path(args.runs)), args.hardware or "")
    learned = learn(rows, left_out)
    name = args.hardware or rows[0].case.topology.device.name
    content = text(
        table(learned, name, target.stem, Path(args.runs).name),
        "Learned by `plan calibrate --runs`; docs/calibrate.md says how.",
    )
    write_atomically(target, content)
    for x in learned:
        console.data("\n".join((x.line(), *(f"  {rate:<12}{change}" for rate, change in x.rows()))))
    for why, n in left_out.items():
        console.say(f"left out: {n} runs: {why}")
    console.say(
        f"wrote {target}   next: plan MODEL --devices N --hardware {target} --runtime"
        f" {learned[0].runtime}"
    )
    return 0
