"""What to type for a plan: the command that makes it again, and those that make a program of it."""

from __future__ import annotations

from collections.abc import Mapping
from shlex import quote
from typing import TYPE_CHECKING, Any

from costmodels.hardware.device import topology_names
from planner.errors import PlanError
from planner.execution.techniques import BY_NAME
from planner.machine.group_names import recorded_name
from planner.machine.topology import for_devices
from planner.machine.topology_file import from_file
from planner.search.options import DEFAULT_HARDWARE, DEFAULT_PRECISION, DEFAULT_RUNTIME
from planner.strategy.strategy import Strategy

if TYPE_CHECKING:
    from planner.pins.pins import Pins

PINS = "PINS.toml"
"""A file of pins that a command line cannot hold; `plan explain` lists them."""
TOPOLOGY = "TOPOLOGY.toml"
COUNTS = "COUNTS.json"
"""A router's counts: the file has them in `workload.routing`."""
STEPS = "-- --steps 1000"
"""What a launched program is told: how long it trains is nobody's default."""


def reproduce(s: Strategy) -> str:
    """`plan zoo:llama3-70b --devices 512 --batch 1024 --pin stage=4`: the options that the file
    records, those at their defaults left out."""
    from planner.strategy.pins import pins_of

    words = ["plan", quote(str(s.provenance.get("source") or s.model["name"])), *options_of(s)]
    words += ["--for", str(launcher)] if (launcher := s.provenance.get("launcher")) else []
    words += ["--pin", quote(short_pins(pins))] if not (pins := pins_of(s)).empty else []
    return " ".join(words)


def options_of(s: Strategy, *, configured: bool = False) -> list[str]:
    """The options that say machine, workload and search of a plan, those at their defaults left
    out. configured: beside a launcher's configuration, which says the batch and is not searched."""
    w, provenance, training = s.workload, s.provenance, s.workload.get("training") or {}
    routing = w.get("routing") or {}
    options = _machine(s, DEFAULT_HARDWARE)
    options += [] if configured else ["--batch", str(w["batch"])]
    options += [part for k, v in w.get("dims", {}).items() for part in ("--dim", quote(f"{k}={v}"))]
    options += [
        part
        for k, v in w.get("shapes", {}).items()
        for part in ("--shape", quote(f"{k}={','.join(map(str, v))}"))
    ]
    usual: list[tuple[str, Any, Any]] = [
        ("workload", w["kind"], "train"),
        ("precision", w["precision"], DEFAULT_PRECISION),
        ("runtime", w["runtime"], DEFAULT_RUNTIME),
        ("optimizer", training.get("optimizer", "adamw"), "adamw"),
        ("lr", training.get("lr", 1e-4), 1e-4),
        ("loss", training.get("loss", ""), "cross_entropy"),
        ("logits", training.get("logits", ""), ""),
        ("ignore-index", training.get("ignore_index"), None),
        ("lora", training.get("lora", ""), ""),
        ("imbalance", COUNTS if "counts" in routing else routing.get("imbalance"), None),
        ("capacity", routing.get("capacity"), None),
        ("tables", training.get("tables", "device"), "device"),
    ]
    if not configured:
        usual += [
            ("mode", provenance.get("mode", "auto"), "auto"),
            ("objective", provenance.get("objective", "step"), "step"),
        ]
    options += [
        part
        for option, value, default in usual
        if value != default and value != ""
        for part in (f"--{option}", quote(str(value)))
    ]
    options += ["--shift-labels"] if training.get("shift_labels") else []
    options += [
        part
        for option in ("trainable", "freeze", "tie")
        for glob in training.get(option, ())
        for part in (f"--{option}", quote(str(glob)))
    ]
    return options


def short_pins(pins: Pins) -> str:
    """Pins as `stage=4,microbatches=64`, or the name of a file where a line cannot hold them."""
    if (
        pins.nodes
        or pins.levels
        or pins.forbidden_factors
        or any(len(sizes) > 1 for sizes in pins.mesh.values())
    ):
        return PINS
    from planner.pins.pins import parse_pins

    text = ",".join(
        [f"{axis}={size}" for axis, (size,) in pins.mesh.items()]
        + [f"{k}={BY_NAME[k].shown(v)}" for k, v in pins.techniques.items()]
    )
    try:
        return text if parse_pins(text) == pins else PINS
    except PlanError:
        return PINS


def _machine(s: Strategy, usual: str) -> list[str]:
    """--devices and --hardware, or a topology file where the levels are not those that the device
    has by default."""

    devices, name = int(s.topology["devices"]), recorded_name(s.topology)
    try:
        same_links = _links(for_devices(name, devices).to_json()) == _links(s.topology)
    except PlanError:
        same_links = True  # a file that is not here: it is named as it was
    if not same_links:
        return [
            "--topology",
            next(
                (
                    t
                    for t in topology_names()
                    if _shipped(t, devices) == (s.topology["device"], _links(s.topology))
                ),
                TOPOLOGY,
            ),
            "--devices",
            str(devices),
        ]
    return ["--devices", str(devices), *(["--hardware", quote(name)] if name != usual else [])]


def _shipped(name: str, devices: int) -> tuple[str, list[tuple[Any, ...]]] | None:
    """Device and links of so many devices of a machine that ships; None where it has not so
    many."""

    try:
        described = from_file(name, devices).to_json()
    except PlanError:
        return None
    return described["device"], _links(described)


def _links(topology: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """What tells machines of one device apart: the name, size and rate of each level, as far as
    files keep digits."""
    return [(x["name"], x["size"], f"{x['bandwidth_bytes_per_s']:.5g}") for x in topology["levels"]]


def onward(s: Strategy, path: str) -> list[tuple[str, str]]:
    """(what it does, command) after a plan: its program, the check of it, and the launch on its
    machine."""
    file = quote(path)
    program = f"plan emit {file} -o program.py"
    if s.workload["kind"] != "train":
        return [("its program", program), ("check it here", f"plan verify {file}")]
    return [
        ("its program", program),
        ("check it here", f"plan verify {file}"),
        ("launch it", f"plan launch {file} --to slurm {STEPS}"),
    ]
