"""What every launcher of training can express of a plan: degrees of parallelism and a few
techniques.

    devices = stage * data * expert * sequence * tensor      replicas of the dense weights: data *
        expert
    batch   = replicas * microbatches * rows of a replica

A plan decides more: a split for every operator. Each thing that a launcher cannot express is a
*rounding*: the settings after it, and a sentence. Roundings follow one another, so that each is
priced under the pins of the settings that remain (planner.interop.price).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log, prod
from typing import TYPE_CHECKING, Any

from costmodels.runtimes import as_framework
from planner.analysis.axis_roles import REPLICATED, role_named
from planner.errors import PlanError
from planner.execution.pipeline import laid_out_blocks
from planner.execution.save_policies import is_named
from planner.execution.techniques import (
    BLOCK_KEEP,
    BY_NAME,
    LOOPED,
    STRUCTURAL,
    WAITING,
    WRITTEN_OUT,
    contradiction,
)
from planner.graph.ir import Graph
from planner.machine.topology import Topology
from planner.ops import operator_of
from planner.sharding.layout import STAGE
from planner.strategy.strategy import Strategy

if TYPE_CHECKING:
    from planner.pins.pins import Pins

AXES = (STAGE, "data", "expert", "sequence", "tensor")
"""Mesh axes, outermost first."""
NEVER_ADDED = ("offload", "copies", "bucket")
"""Techniques that a plan of some settings does not have."""


@dataclass(frozen=True)
class Settings:
    """Degrees, and techniques as the planner calls them. positions: what lies between products is
    cut along the sequence over "tensor" (Megatron's sequence parallelism). length: tokens of a row,
    0 where rows have none. virtual: virtual stages per stage. styles: how "tensor" cuts
    single modules, pattern and style (planner.interop.launchers.hf); none: as it costs least.
    offload: what waits in the host's memory, of "activations". precision: the recipe that training
    computes in (costmodels.precision), "" where nothing is said of it. zero_group: neighbouring
    devices of a stage that share one copy of what the ZeRO stage cuts, 0 for all of them.
    exchanges: whether kernels wait for experts' rows (planner.execution.techniques). blocks:
    whether programs loop over their layers or have them written out, as long as nothing else asks
    for loops; "" where that is nobody's to say."""

    batch: int
    stage: int = 1
    data: int = 1
    expert: int = 1
    sequence: int = 1
    tensor: int = 1
    microbatches: int = 1
    zero_stage: int = 0
    recompute: str = "none"
    schedule: str = ""
    positions: bool = False
    length: int = 0
    virtual_stages: int = 1
    styles: tuple[tuple[str, str], ...] = ()
    offload: tuple[str, ...] = ()
    precision: str = ""
    zero_group: int = 0
    exchanges: str = WAITING
    blocks: str = ""

    @property
    def mesh(self) -> dict[str, int]:
        """Axis -> degree, those of 1 left out unless there is no other."""
        return {a: n for a in AXES if (n := getattr(self, a)) > 1} or {"data": 1}

    @property
    def devices(self) -> int:
        """Product of the degrees."""
        return prod(getattr(self, a) for a in AXES)

    @property
    def replicas(self) -> int:
        """Groups of devices with rows of their own."""
        return self.data * self.expert

    @property
    def copies(self) -> int:
        """Groups that have a copy each of what the ZeRO stage cuts, the outermost of the data
        axis."""
        return self.devices // (self.stage * self.zero_group) if self.zero_group else 1

    @property
    def rows(self) -> int:
        """Rows of one replica in one microbatch."""
        return self.batch // (self.replicas * self.microbatches)

    @property
    def runs_inference(self) -> bool:
        """Whether nothing is set that training alone has."""
        return self.microbatches == 1 and not self.zero_stage and self.recompute == "none"

    def pins(self) -> Pins:
        """Degrees and techniques as pins of a search. What no launcher does by itself is not added:
        nothing waits in the host's memory, no two microbatches overlap, and collectives are fused
        as the compiler fuses them unasked."""
        from planner.pins.pins import Pins

        techniques: dict[str, Any] = {name: BY_NAME[name].neutral for name in NEVER_ADDED}
        techniques |= {
            t.name: value
            for t in STRUCTURAL
            for value in [getattr(self, t.field)]
            if not t.staged or (self.stage > 1 and value != t.neutral)
        }
        if self.offload:
            techniques["offload"] = self.offload
        techniques["exchanges"] = self.exchanges
        if self.zero_group:
            techniques["zero_group"] = self.zero_group
        if self.tensor > 1:
            techniques["tensor"] = "megatron-sp" if self.positions else "megatron"
        mesh = {a: (n,) for a, n in self.mesh.items()}
        if self.blocks:
            loops = contradiction({**techniques, "blocks": self.blocks}, mesh) is not None
            techniques["blocks"] = LOOPED if loops else self.blocks
        return Pins(mesh, techniques)

    @property
    def written_out(self) -> bool:
        """Whether layers are written out and nothing asks for a loop over them."""
        return self.pins().techniques.get("blocks") == WRITTEN_OUT

    def scanned(self, scan: bool, notes: list[str]) -> Settings:
        """The same of a program that scans its layers or writes them out; a note says where they
        are priced in a loop all the same."""
        new = replace(self, blocks=LOOPED if scan else WRITTEN_OUT)
        if not scan and not new.written_out:
            notes.append(
                "layers that are not scanned are priced in a loop: here recompute, ZeRO-3, stages"
                " and what is offloaded ask for one"
            )
        return new


def sharing(copies: int, data: int, devices: int, domain: int, notes: list[str]) -> int:
    """`Settings.zero_group` of a stage of so many devices whose data axis is, outermost, so many
    copies of what is sharded. domain: devices on fast links. Groups that are no whole part of the
    axis, or cross the edge of a domain, are left out, and a note says so."""
    if copies == 1:
        return 0
    group = devices // copies
    if data % copies or (domain % group and group % domain):
        notes.append("hybrid sharding is priced as sharding over all replicas")
        return 0
    return group


@dataclass(frozen=True)
class Facts:
    """What launchers need to know beside the settings. layers: blocks that stages could be made of,
    0 for none; each: layers of such a block, several where they alternate (windows and whole
    attention); beside: layers in none of them, such as a dense one before those with experts;
    outside: work before the blocks and after them, as multiples of a block's;
    modules: those that are recomputed by name (planner.pricing.frameworks.selective)."""

    model: str
    topology: Topology
    layers: int = 0
    beside: int = 0
    outside: tuple[float, float] = (0.0, 0.0)
    modules: tuple[str, ...] = ()
    each: int = 1

    @property
    def all_layers(self) -> int:
        """Layers of the model."""
        return self.layers * self.each + self.beside

    def chunks(self, stages: int, virtual_stages: int) -> tuple[int, ...]:
        """Layers of each chunk of a pipeline, in the model's order, as they are priced; () where
        there are too few."""
        blocks = laid_out_blocks(self.layers, stages * virtual_stages, *self.outside)
        layers = tuple(n * self.each for n in blocks)
        return (layers[0] + self.beside, *layers[1:]) if all(blocks[1:-1]) else ()


class Rounds:
    """Settings, and what was rounded so far. framework: whether the plan is priced as a framework
    runs it, whose selective recompute is not what emitted programs save."""

    def __init__(self, settings: Settings, *, framework: bool = True) -> None:
        self.now, self.framework = settings, framework
        self.steps: list[tuple[Settings, str]] = []

    def to(self, reason: str, **change: Any) -> None:
        """One rounding; nothing where the settings have it already."""
        new = replace(self.now, **change)
        if new != self.now:
            self.now = new
            self.steps.append((new, reason))

    def usual(
        self, launcher: str, *, by_name: bool = False, selective: bool = False, beside: bool = False
    ) -> None:
        """What no launcher expresses: padded rows, recompute with saved collectives, sharding of
        the state of an optimizer that has one replica. by_name: it saves values by name; selective:
        it has a recompute that is priced as that one; beside: it can send experts' rows beside
        other kernels."""
        self.microbatches(launcher, 1)
        if not beside:
            self._waiting()
        if not by_name:
            self.to("what enters blocks stays on the devices", offload=())
        if self.now.recompute == BLOCK_KEEP and not (selective and self.framework):
            self.to("recompute runs a block's collectives again", recompute="block")
        if is_named(self.now.recompute) and not by_name:
            self.to("recompute is of whole blocks, no value of them saved", recompute="block")
        if self.now.zero_stage and self.now.replicas * self.now.sequence == 1:
            self.to("no optimizer sharding where there is one replica", zero_stage=0)

    def _waiting(self) -> None:
        self.to("kernels wait for experts' rows", exchanges=WAITING)

    def together(self, reason: str) -> None:
        """All experts on every replica: none of their rows travel, for which kernels would wait."""
        if self.now.expert > 1:
            self._waiting()
            self.to(reason, data=self.now.replicas, expert=1)

    def unstaged(self) -> None:
        """Pipeline stages as replicas."""
        if self.now.stage > 1:
            self.to(
                "no pipeline stages: data parallel instead",
                data=self.now.data * self.now.stage,
                stage=1,
                schedule="",
                virtual_stages=1,
            )

    def microbatches(self, launcher: str, multiple: int) -> None:
        """As many microbatches as give every replica whole rows, a multiple of some number, the
        nearest to what the plan has."""
        s = self.now
        rows, rest = divmod(s.batch, s.replicas)
        if rest:
            raise PlanError(
                "P192",
                f"{launcher} has no setting for a batch of {s.batch} on {s.replicas} replicas:"
                " every replica has as many rows",
                help=["plan a batch that the data axis divides"],
            )
        least = 2 if s.stage > 1 else 1
        fitting = [m for m in range(multiple, rows + 1, multiple) if rows % m == 0 and m >= least]
        if not fitting:
            raise PlanError(
                "P192",
                f"{launcher} divides {rows} rows of a replica into a multiple of {multiple}"
                " microbatches, which is not possible",
                help=["plan a larger batch, or fewer stages"],
            )
        nearest = min(fitting, key=lambda m: (abs(log(m / s.microbatches)), m))
        self.to(
            f"{nearest} microbatches for {s.microbatches}: whole rows on every replica"
            + (f", a multiple of {multiple}" if multiple > 1 else ""),
            microbatches=nearest,
        )


def settings_of(strategy: Strategy, *, loops: bool) -> Rounds:
    """The settings nearest to a strategy, with what that leaves out. loops: whether they say how
    programs run their layers. Raises PlanError P192: axes no launcher has a setting for."""
    degrees, lost = dict.fromkeys(AXES, 1), []
    for name, size in strategy.mesh_shape:
        role = name if name == STAGE else role_named(name)
        if not role and size > 1:
            idle = (
                [
                    f"its {size} devices do the same work: plan for fewer devices, or --pin"
                    f" dp={size} with a batch that it divides"
                ]
                if name.startswith(REPLICATED)
                else []
            )
            raise PlanError(
                "P192",
                f"no launcher has a setting for the mesh axis {name!r}",
                help=[*idle, f"axes called {', '.join(AXES)}"],
            )
        if size > 1:
            lost += (
                [f"{degrees[role]} and {size} of {role} as one axis"] if degrees[role] > 1 else []
            )
            degrees[role] *= size
    chosen = strategy.chosen
    group = _group(strategy)
    if group < 0:
        lost.append("optimizer state cut over all replicas, not in groups of them")
    lost += (
        ["optimizer state on the devices instead of offloaded to host memory"]
        if "optimizer" in chosen.offload
        else []
    )
    graph, precision = strategy.graph, str(strategy.workload["precision"])
    techniques = {t.field: getattr(chosen, t.field) for t in STRUCTURAL}
    rounds = Rounds(
        Settings(
            int(strategy.workload["batch"]),
            **(degrees | techniques),
            offload=tuple(w for w in chosen.offload if w == "activations"),
            positions=degrees["tensor"] > 1 and cuts_positions(strategy),
            length=row_length(graph) if graph is not None else 0,
            precision=precision if strategy.workload["kind"] == "train" else "",
            zero_group=max(0, group),
            exchanges=chosen.exchanges,
            blocks=chosen.blocks if loops else "",
        ),
        framework=as_framework(str(strategy.workload.get("runtime"))),
    )
    if lost:
        rounds.steps.append((rounds.now, ", ".join(lost)))
    return rounds


def _group(strategy: Strategy) -> int:
    """`Settings.zero_group` of a strategy; -1 where the axes that its state is not cut over are no
    outermost part of the data axis."""
    chosen = strategy.chosen
    cutting = [(a, n) for a, n in strategy.mesh_shape if n > 1 and a != STAGE]
    inside = [a in chosen.zero_axes for a, _ in cutting]
    if not chosen.zero_stage or all(inside):
        return 0
    outside = [a for (a, _), there in zip(cutting, inside, strict=True) if not there]
    if inside != sorted(inside) or any(role_named(a) != "data" for a in outside):
        return -1
    return prod(n for (_, n), there in zip(cutting, inside, strict=True) if there)


def cuts_positions(strategy: Strategy) -> bool:
    """Whether norms see part of the positions: what lies between products is cut along the sequence
    over "tensor"."""
    rows = [
        strategy.tensors[o]
        for n in strategy.nodes.values()
        if operator_of(n["op"]).kind == "norm"
        for o in n["outputs"]
        if o in strategy.tensors
    ]
    return any(
        role_named(a) == "tensor" for row in rows for dim in row["layout"][1:-1] for a in dim
    )


def row_length(graph: Graph) -> int:
    """Tokens of a row: the second dim of the first input of whole numbers [batch, positions], 0
    where there is none."""
    return next(
        (
            t.shape[1]
            for n in graph.inputs
            if len((t := graph.tensors[n]).shape) == 2 and not t.is_float
        ),
        0,
    )
