"""The strategy file as types. Keys that may be missing are `NotRequired`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict

from planner.execution.techniques import OF_PLANS
from planner.support.table_types import GroupTable, Split


class ModelTable(TypedDict):
    """What was planned."""

    name: str
    sha256: str
    nodes: int
    parameters: int


class LevelTable(TypedDict):
    """One level of links; bandwidths per device and direction, in bytes a second."""

    name: str
    size: int
    kind: str
    bandwidth_bytes_per_s: float
    latency_s: float
    efficiency: float
    wrap: bool
    all_reduce_bytes_per_s: NotRequired[float]
    all_reduce_latency_s: NotRequired[float]


class AnchorTable(TypedDict):
    """The model whose measured step prices are scaled to, and what runtime profiles then reach of
    the device (costmodels.runtimes.Rates)."""

    model: str
    rates: dict[str, dict[str, float]]


class TopologyTable(TypedDict):
    """The machine; levels innermost first. hardware: the file of a device that does not ship;
    groups: what devices of several kinds there are, group_levels: of each the links among its own
    devices, where they differ; anchor: to what step prices are scaled."""

    device: str
    hardware: NotRequired[str]
    groups: NotRequired[list[GroupTable]]
    group_levels: NotRequired[list[list[LevelTable]]]
    anchor: NotRequired[AnchorTable]
    devices: int
    levels: list[LevelTable]


class TrainingTable(TypedDict):
    """What training means."""

    loss: str
    logits: str
    optimizer: str
    lr: float
    trainable: list[str]
    freeze: list[str]
    shift_labels: bool


class RoutingTable(TypedDict):
    """What the user said of routers of experts: rows of the busiest device over the mean, or counts
    of a router, one for each expert; and how many times the mean an expert takes."""

    imbalance: NotRequired[float]
    counts: NotRequired[list[int]]
    capacity: NotRequired[float]


class WorkloadTable(TypedDict):
    """What is run. routing: where the user said something of it."""

    kind: Literal["train", "infer"]
    batch: int
    dims: dict[str, int]
    shapes: dict[str, list[int]]
    precision: str
    runtime: str
    training: TrainingTable | None
    routing: NotRequired[RoutingTable]


class AxisTable(TypedDict):
    """A mesh axis and the levels of links it runs over."""

    name: str
    size: int
    levels: list[str]


class RunnerUp(TypedDict):
    """The next best split of a node, and what it would cost more. nodes: of how many nodes that
    decide alike, where layers inside a block do."""

    split: Split
    extra_s: float
    nodes: NotRequired[int]


class NodeTable(TypedDict):
    """One operator; `times`: how many nodes are like it, itself included; `time_s`: kernels of
    those a device runs, in one microbatch."""

    op: str
    split: Split
    stage: int
    recompute: bool
    time_s: float
    times: int
    outputs: list[str]
    unsupported: NotRequired[str]
    attention_kernel: NotRequired[str]
    """Of attention on accelerators: the kernel that the emitted program runs it with, and after a
    colon what keeps a fused one from serving."""
    expert_kernel: NotRequired[str]
    """Of routed experts without a capacity on accelerators: triton (NVIDIA GPUs) or mosaic (TPUs),
    one kernel for the rows of all of them, or blocks, and after a colon why."""
    saved_as: NotRequired[str]
    """Of what recomputed blocks save by name: that name."""
    runner_up: NotRequired[RunnerUp]
    members: NotRequired[list[str]]


class BlockTable(TypedDict):
    """A run of nodes that recurs: the first repeat's body stands for all; `per_stage`: repeats a
    pipeline stage holds; ids of a repeat's nodes have, behind `scope`, a number that is `step`
    higher than in the repeat before.
    """

    body: list[str]
    first: int
    period: int
    repeats: int
    per_stage: NotRequired[int]
    scope: NotRequired[str]
    step: NotRequired[int]


class ZeroTable(TypedDict):
    """How the optimizer's state of a weight is cut."""

    level: int
    dim: int
    axes: list[str]


class TensorTable(TypedDict):
    """The producer's layout: mesh axes per dim; `stage`: of a weight that one pipeline stage alone
    holds."""

    shape: list[int]
    layout: list[list[str]]
    partial: list[str]
    padded: bool
    memory: Literal["device", "host"]
    label: NotRequired[str]
    stage: NotRequired[int]
    zero: NotRequired[ZeroTable]


class SideTable(TypedDict):
    """An operand or result as its node has it: the factors of each dim, the mesh axes that cut it,
    the axes over which terms are still to be added."""

    tensor: str
    dims: list[str]
    layout: list[list[str]]
    partial: list[str]


class KernelTable(TypedDict):
    """Seconds of a pass forward and backward (forward `again` where recomputed), passes a step,
    seconds a step, those in bubbles, and what binds."""

    forward_s: float
    backward_s: float
    again: bool
    times: int
    step_s: float
    bubble_s: float
    bound_by: str


class MoveTable(TypedDict):
    """Collectives of one kind on one tensor: how many a step, their bytes and seconds together;
    axes joined by +."""

    kind: str
    axes: str
    phase: str
    tensor: str
    count: int
    payload_bytes: int
    time_s: float


class DetailTable(TypedDict):
    """Why one operator costs what it does, for `plan explain`."""

    rule: str
    sizes: dict[str, int]
    operands: list[SideTable]
    results: list[SideTable]
    kernels: KernelTable
    moves: list[MoveTable]


_TECHNIQUES_IN_WORDS = """\
What was chosen beside the splits; `virtual`: chunks that a pipeline stage holds, where several.
cuts: of stages without a block in common the node that each begins with after the first; widths:
how many places along the axis "stage" each of them takes, where not one each.

offload: what waits in the host's memory; "optimizer": moments and master copies; "activations":
what enters recomputed blocks; "parameters": their weights, with gradients; "embeddings": tables
that are looked up, with theirs. copies: microbatches that run at the same time.
fused_collective_bytes: GPUs send gradients, and updated parameters, together up to so many bytes;
0: as their compiler does by itself.
"""
if TYPE_CHECKING:
    TechniqueTable = dict[str, Any]
else:
    TechniqueTable = TypedDict(
        "TechniqueTable",
        {t.key: NotRequired[t.file_type] if t.optional else t.file_type for t in OF_PLANS}
        | {"cuts": NotRequired[list[str]], "hosted": NotRequired[list[str]]},
    )
    TechniqueTable.__doc__ = _TECHNIQUES_IN_WORDS


class MemoryTable(TypedDict):
    """Bytes of one device at the peak, by part."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    temporary: int


class TrafficTable(TypedDict):
    """Bytes of one device and step: handed to the collective, and on the wire of a ring."""

    payload: float
    wire: float


class IslandTable(TypedDict):
    """What devices of one kind do in a step: microbatches of each of their islands, seconds that
    the busiest of these takes without waiting for others."""

    device: str
    devices: int
    microbatches: list[int]
    busy_s: float


class CostTable(TypedDict):
    """The price; communication_bytes_per_device: kind -> axes joined by + -> bytes. tie_range_s:
    steps of other plans between these cannot be told from this plan's. dropped_choices: part of the
    tokens' choices of experts that find no place; tokens a second and FLOPs used are less them.
    islands: where devices of several kinds have shares of their own; FLOPs and use are means of all
    devices then, memory is the largest."""

    step_time_s: float
    step_time_range_s: list[float]
    compute_time_s: float
    recompute_time_s: float
    communication_time_s: float
    exposed_communication_time_s: float
    exposed_s_by_collective: dict[str, float]
    bubble_time_s: float
    optimizer_time_s: float
    flops_per_device: float
    distinct_work: float
    model_flops_utilization: float
    memory_per_device_bytes: int
    memory_range_bytes: list[int]
    memory_limit_bytes: int
    memory_breakdown_bytes: MemoryTable
    fit: Literal["yes", "tight", "no"]
    communication_bytes_per_device: dict[str, dict[str, TrafficTable]]
    tie_range_s: NotRequired[list[float]]
    tables_time_s: NotRequired[float]
    loop_copy_time_s: NotRequired[float]
    host_memory_bytes: NotRequired[int]
    newton_schulz_time_s: NotRequired[float]
    offloaded_per_device_bytes: NotRequired[int]
    tokens_per_step: NotRequired[int]
    tokens_per_s_per_device: NotRequired[float]
    dropped_choices: NotRequired[float]
    islands: NotRequired[list[IslandTable]]


class BaselineTable(CostTable):
    """A baseline's price, its mesh and its techniques."""

    mesh: dict[str, int]
    zero_stage: int
    recompute: str
    microbatches: int
    schedule: NotRequired[str]
    virtual: NotRequired[int]
    offload: NotRequired[list[str]]


class CoveredTable(TypedDict):
    """Plans that the bound holds for: meshes as sizes of their axes, outermost first, stages before
    a bar (`4|8x8`), with these numbers of microbatches. splits: "some" where only those were tried
    that cut what plans found before cut."""

    meshes: list[str]
    microbatches: list[int]
    splits: Literal["all", "some"]


# `from` is a keyword of the language. bound_memory_bytes: the bound is of plans that are priced at
# so many bytes at most, which fit with the upper end of their range; where missing of all that fit.
SolverTable = TypedDict(
    "SolverTable",
    {
        "name": str,
        "status": Literal["optimal", "feasible"],
        "objective_s": float,
        "bound_s": NotRequired[float | None],
        "gap": NotRequired[float | None],
        "plans_tried": int,
        "problem_status": str,
        "from": str,
        "bound_memory_bytes": NotRequired[int],
        "covers": NotRequired[list[CoveredTable]],
    },
)


class FindingRow(TypedDict):
    """What a user should not miss, the gravest first (planner.graph.findings.KINDS)."""

    kind: str
    text: str


class RejectedTable(TypedDict):
    """A plan that the compiler said does not fit, or failed on: what tells it from others, and
    why."""

    mesh: dict[str, int]
    zero_stage: int
    recompute: str
    microbatches: int
    step_time_s: float
    planned_bytes: int
    peak_bytes: int
    flops_ratio: NotRequired[float]
    why: str


class ConfirmedTable(TypedDict):
    """What a compiler said when the plan was made (--confirm). fits: of the plan of this file,
    whose peak it is; flops_ratio: products as compiled by those planned."""

    target: str
    fits: bool
    limit_bytes: int
    peak_bytes: NotRequired[int]
    flops_ratio: NotRequired[float]
    rejected: list[RejectedTable]
    stopped: NotRequired[str]


class StrategyFile(TypedDict):
    """A strategy file."""

    format_version: str
    model: ModelTable
    topology: TopologyTable
    workload: WorkloadTable
    mesh: list[AxisTable]
    nodes: dict[str, NodeTable]
    blocks: list[BlockTable]
    tensors: dict[str, TensorTable]
    techniques: TechniqueTable
    cost: CostTable
    solver: SolverTable
    baselines: dict[str, BaselineTable]
    assumptions: list[str]
    findings: NotRequired[list[FindingRow]]
    provenance: dict[str, Any]
    details: NotRequired[dict[str, DetailTable]]
    confirmed: NotRequired[ConfirmedTable]
