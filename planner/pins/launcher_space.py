"""What each launcher of training can say of a plan: the space that `--for NAME` searches.

    devices = stage * data * expert * sequence * tensor, each a whole degree
    batch   = data * expert * microbatches * rows of a replica

A launcher has these degrees, or some of them, and a few techniques; "tensor" cuts columns, then
rows, as Megatron does. Such plans export to it without rounding (planner.interop.settings says what
is rounded of others). Degrees become choices of sizes for pinned axes, techniques are held in the
search's domain (planner.search.domain).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.errors import PlanError, did_you_mean
from planner.execution.save_policies import is_named, kept_among
from planner.execution.techniques import (
    BLOCK_KEEP,
    BY_NAME,
    INTERLEAVED,
    LOOPED,
    SCHEDULE_WORDS,
    WRITTEN_OUT,
)
from planner.machine.mesh_choices import divisors
from planner.machine.topology import Topology, domain_of
from planner.pins.pins import Pins
from planner.sharding.layout import STAGE

MOST_TENSOR, MOST_STAGES = 64, 64
"""Widest tensor axis and deepest pipeline that are tried: none that was published is wider."""


@dataclass(frozen=True)
class LauncherSpace:
    """One launcher.

    version      of its configuration that this space was read from
    runtime      the profile that prices its programs
    axes         degrees it has beside data
    tensor       what "tensor" cuts (planner.execution.techniques.TENSOR)
    zero_stages  those it has on several replicas, the least first
    groups       parameters may be sharded over groups of replicas, each with a copy (HSDP)
    recompute    ways to recompute; names: values that recomputed blocks may save beside
    modules      whether it recomputes modules of a block by name: "block-keep", of models that have
                 some (planner.pricing.frameworks.selective)
    offloads     what may wait in the host's memory, of planner.execution.techniques.OFFLOAD
    schedules    of pipeline stages
    whole_rounds microbatches are a multiple of the stages
    uneven       the first and the last stage may hold fewer layers than the others (`ends`)
    layouts      layers of every stage, and of every chunk of one, may be said one by one
    precisions   recipes that its files say
    loops        whether its programs loop over their layers unless they are told otherwise
    """

    name: str
    version: str
    runtime: str
    axes: tuple[str, ...]
    tensor: str
    zero_stages: tuple[int, ...]
    groups: bool = False
    recompute: tuple[str, ...] = ("none", "block")
    names: tuple[str, ...] = ()
    modules: bool = False
    offloads: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()
    whole_rounds: bool = False
    uneven: bool = False
    layouts: bool = False
    precisions: tuple[str, ...] = ("bf16-mixed", "fp32")
    loops: bool = False

    def zero_with(
        self, sequence: int, data: int, replicas: int, stages: int = 1
    ) -> tuple[int, ...]:
        """ZeRO stages on so many context ranks, data ranks, replicas of the dense weights, and
        pipeline stages."""
        if replicas * sequence == 1:
            return (0,)
        if self.name == "torchtitan":  # with stages gradients are scattered once a step
            return tuple(z for z in self.zero_stages if (z == 1) == (stages > 1))
        if self.name == "maxtext" and data == 1:  # fsdp ranks alone gather parameters
            return tuple(z for z in self.zero_stages if z < 3)
        return self.zero_stages

    def policy(self, recompute: str) -> str:
        """A way to recompute without the names that the launcher has none for."""
        if not is_named(recompute):
            return recompute
        return kept_among(recompute, self.names)

    def microbatches(self, offered: tuple[int, ...], rows: int, stages: int) -> tuple[int, ...]:
        """Of offered numbers of microbatches those that divide the rows of a replica, and go
        through so many stages in whole rounds where the launcher asks for that."""
        multiple = stages if self.whole_rounds and stages > 1 else 1
        return tuple(m for m in offered if rows % m == 0 and m % multiple == 0)


SPACES = {
    s.name: s
    for s in (
        LauncherSpace(
            "megatron",
            "Megatron Core 0.20",
            "megatron",
            (STAGE, "expert", "sequence", "tensor"),
            "megatron-sp",
            (0, 1, 3),
            modules=True,
            schedules=("1f1b", INTERLEAVED),
            uneven=True,
            layouts=True,
            precisions=("bf16-mixed", "bf16-fp32-grads", "fp16", "fp8", "fp8-fp32-grads", "fp32"),
        ),
        LauncherSpace(
            "maxtext",
            "MaxText of August 2026",
            "jax-shard_map",
            (STAGE, "expert", "sequence", "tensor"),
            "megatron-sp",
            (0, 1, 3),
            groups=True,
            names=("q", "k", "v", "context", "out_proj", "mlp_gate", "mlp_up", "mlp_down"),
            offloads=("activations",),
            schedules=("gpipe",),
            whole_rounds=True,
            precisions=("bf16-mixed", "bf16-pure", "fp8", "fp32"),
            loops=True,
        ),
        LauncherSpace(
            "torchtitan",
            "torchtitan 0.2.2",
            "fsdp",
            (STAGE, "expert", "sequence", "tensor"),
            "megatron-sp",
            (1, 2, 3),
            groups=True,
            recompute=("none", BLOCK_KEEP, "block"),
            schedules=("1f1b", INTERLEAVED),
            uneven=True,
            precisions=("bf16-mixed", "fp8", "fp32"),
        ),
        LauncherSpace(
            "hf",
            "accelerate of July 2026",
            "fsdp",
            ("sequence", "tensor"),
            "megatron",
            (2, 3),
            groups=True,
            precisions=("bf16-mixed", "fp16", "fp8", "fp32"),
        ),
        LauncherSpace(
            "levanter",
            "Levanter of 2026",
            "jax-shard_map",
            ("sequence", "tensor"),
            "megatron",
            (0, 3),
            groups=True,
            precisions=("bf16-mixed", "bf16-pure", "fp32"),
            loops=True,
        ),
    )
}
"""Name -> space. Read from Megatron-LM d98e8a6, MaxText e591f30, torchtitan b5bcd76, accelerate
16cb6eb and marin 165dd09. Stage 2 of ZeRO takes the time of stage 1 in Megatron and is left out;
torchtitan has stage 1 with pipeline stages, and others without."""


OTHER_NAMES = {
    **dict.fromkeys(("accelerate", "transformers", "trainer", "huggingface", "hugging-face"), "hf"),
    **dict.fromkeys(
        ("nemo", "bridge", "mcore", "megatron-lm", "megatron-core", "megatron-bridge"), "megatron"
    ),
    "titan": "torchtitan",
    "marin": "levanter",
}
"""What people call launchers -> its name here."""


def choose_launcher(option: str, value: str, known: Sequence[str]) -> None:
    """Raise PlanError P018 unless the value of an option is one of these launchers."""
    if value not in known:
        meant = OTHER_NAMES.get(value.lower().replace("_", "-"), "")
        near = f"did you mean {meant!r}?" if meant in known else did_you_mean(value, known)
        raise PlanError(
            "P018",
            f"--{option} {value!r}: unknown",
            help=[h for h in (near, f"one of {', '.join(known)}") if h],
        )


def ends(layers: int, stages: int) -> tuple[int, int] | None:
    """Layers of the first and of the last of several stages, where all between hold as many as the
    fullest one has to; None where too few are left for the ends."""
    most = -(-layers // stages)
    end_layers = layers - (stages - 2) * most
    return (
        (end_layers // 2, end_layers - end_layers // 2) if stages > 1 and end_layers > 1 else None
    )


def within(space: LauncherSpace, pins: Pins, topology: Topology, workload: str) -> Pins:
    """Pins that leave what a launcher can say, under the user's own. Raises PlanError P024 where
    these say something else."""
    if workload != "train" and space.name != "hf":
        raise PlanError(
            "P024",
            f"--for {space.name} and --workload {workload} contradict each other: it trains",
            help=["--for hf, whose weights are cut by module, or leave --for out"],
        )
    _refuse_others(space, pins, workload)
    n, domain = topology.devices, domain_of(topology)
    most = {STAGE: MOST_STAGES, "tensor": min(domain, MOST_TENSOR)}
    if workload != "train":
        most |= {STAGE: 1, "sequence": 1}
    if pins.techniques.get("offload") or pins.techniques.get("blocks") == WRITTEN_OUT:
        most |= {STAGE: 1}  # neither goes with stages
    open_sizes = {a: tuple(d for d in divisors(n) if d <= most.get(a, n)) for a in space.axes}
    fixed: Mapping[str, Any] = {
        "tensor": space.tensor,
        "copies": BY_NAME["copies"].neutral,
        "bucket": BY_NAME["bucket"].neutral,
        **({} if space.offloads else {"offload": BY_NAME["offload"].neutral}),
        **({"blocks": LOOPED} if space.loops and workload == "train" else {}),
    }
    return replace(
        pins, mesh={**open_sizes, **pins.mesh}, techniques={**fixed, **dict(pins.techniques)}
    )


def _refuse_others(space: LauncherSpace, pins: Pins, workload: str) -> None:
    """Raises PlanError P024 for a pin that the launcher cannot say."""

    def refuse(pin: str, why: str, *instead: str) -> PlanError:
        return PlanError(
            "P024",
            f"pin {pin} and --for {space.name} contradict each other: {why}",
            help=[*instead, "remove the pin, or --for"],
        )

    for axis, sizes in pins.mesh.items():
        if axis == "fsdp":
            size = " or ".join(map(str, sizes))
            copies = pins.mesh.get("data", (1,))[0]
            group = f",zero_group={sizes[0]}" if copies > 1 else ""
            raise refuse(
                f"fsdp = {size}",
                "its replicas are one axis",
                f"dp={copies * sizes[0]},zero=3{group} says the same",
            )
        if axis not in (*space.axes, "data") and min(sizes) > 1:
            raise refuse(f"{axis} = {min(sizes)}", f"{space.version} has no such degree")
    if pins.nodes or pins.levels or pins.forbidden_factors:
        what = next(iter(pins.nodes), "") or next(iter(pins.levels), "") or "[forbid]"
        raise refuse(repr(what), "it cannot say where single operators are cut")
    asked = pins.techniques
    known: dict[str, tuple[Any, ...]] = {
        "zero_stage": tuple(dict.fromkeys((0, *space.zero_stages))),
        "schedule": space.schedules,
        "tensor": (space.tensor,),
        "copies": (BY_NAME["copies"].neutral,),
        "bucket": (BY_NAME["bucket"].neutral,),
        "offload": (BY_NAME["offload"].neutral, *((what,) for what in space.offloads)),
    }
    if not space.names:
        known["recompute"] = (*space.recompute, *[BLOCK_KEEP] * space.modules)
    for name, values in known.items():
        if name in asked and asked[name] not in values:
            shown = BY_NAME[name].shown
            others = ", ".join(SCHEDULE_WORDS.get(v, shown(v)) for v in values) or "none"
            raise refuse(f"{name} = {shown(asked[name])}", f"{space.version} has {others}")
