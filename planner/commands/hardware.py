"""`plan hardware`: the devices and machines that ship, with the source of every figure."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from planner.support import console


def hardware(args: argparse.Namespace) -> int:
    """The devices and machines that ship, or one with the source of every figure."""
    from costmodels.hardware.describe import (
        as_json,
        describe,
        describe_topology,
        library,
        overview,
        topology_table,
    )
    from costmodels.hardware.device import machine_named
    from planner.machine.topology import device
    from planner.machine.topology_file import from_file, is_topology

    name = args.name
    if not name:
        table, text = library(), overview(console.width())
    elif is_topology(name):
        from_file(name, None)  # refuses what a plan would refuse
        table, text = topology_table(name), describe_topology(name, console.width())
    elif machine_named(name) and not Path(name).exists():
        table, text = topology_table(name), describe_topology(name, console.width())
    else:
        chip = device(name)
        table, text = as_json(chip), describe(chip, console.width())
    console.data(json.dumps(table, indent=2, sort_keys=True) if args.json else text)
    return 0
