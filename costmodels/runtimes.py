"""Runtime profiles: whose program is priced. Constants that belong to how a program runs, not to
the hardware, each with its source or the word guess.

A profile is a file costmodels/runtimes/NAME.toml whose keys are the fields of `Runtime`, and a name
in NAMES. `[sources]` and `[guessed]` say of every constant where it is from, or why it has this
value. `kernels` names a set of costmodels/runtimes/kernel_sets.toml.

The profiles `jax-*` price what is emitted, those of ENGINES plans that engines are to serve.
`megatron` and `fsdp` price others' runs as those programs run them (costmodels.frameworks): their
kernels are described by `Kernels`, their rates beside the device's by `Rates`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from costmodels.frameworks.fused_attention import generation_of

FOLDER = Path(__file__).with_name("runtimes")
NAMES = ("jax-shard_map", "jax-jit", "megatron", "fsdp")
"""Known profiles, the default first."""
ENGINES = ("vllm", "sglang")
"""Profiles of engines that serve, which are asked for by the engine's name (`--for`)."""
SAVED_PRODUCTS = {"product": 1.0, "into residual": 1.0, "attention": 1.0}
"""Kernels.saved under selective recompute with flash attention: results of products and of
attention are saved, what is computed element by element is recomputed."""


@dataclass(frozen=True)
class Kernels:
    """What the kernels of a framework move and save, by the role of a node
    (planner.pricing.frameworks.kernels.role).

    passes: role -> bytes that cross memory (forward, backward) as multiples of the result's bytes.
    saved: role -> bytes saved for the backward pass, likewise. score_bytes, logit_bytes: bytes
    moved (forward, backward) per element of attention scores and of logits. score_saved,
    logit_saved: bytes saved of each; score_workspace: bytes beside those saved while one block runs
    backward; logit_gathered, logit_piece: bytes more per element of logits, and of the local piece,
    where the loss gathers pieces. flash: attention keeps its scores on chip and skips what a causal
    mask hides; `attention` is then its kernel (costmodels.frameworks.fused_attention).
    recomputes_scores: the core of attention is recomputed in the backward pass (selective
    recompute), its scores are not saved. recomputed: how much of the forward pass of products, and
    of what goes element by element, is recomputed in the backward pass (selective recompute beside
    flash attention). saves_gathered: what products take whole of a tensor that is cut along the
    sequence, they save whole. offloaded_share: share of the blocks whose saved tensors are
    offloaded. cast: bytes moved per byte of what an eight-bit product reads, and of its result's
    gradient, to bring them into eight bits; 0 where the kernels before it do. expert_rows: what
    kernels beside the products of routed experts move of each row that an expert gets, two bytes
    each: (model widths, hidden widths) forward, then backward. expert_waits_s: what these kernels
    wait for the host in each pass, which reads how many rows each expert gets before it starts
    them.
    """

    passes: Mapping[str, tuple[float, float]]
    saved: Mapping[str, float]
    flash: bool = True
    attention: str = "flash2"
    score_bytes: tuple[float, float] = (0.0, 0.0)
    score_saved: float = 0.0
    score_workspace: float = 0.0
    logit_bytes: tuple[float, float] = (20.0, 14.0)
    logit_saved: float = 10.0
    logit_gathered: float = 0.0
    logit_piece: float = 0.0
    recomputes_scores: bool = False
    recomputed: tuple[float, float] = (0.0, 0.0)
    saves_gathered: bool = False
    offloaded_share: float = 0.0
    cast: float = 0.0
    expert_rows: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    expert_waits_s: float = 0.0


@dataclass(frozen=True)
class Rates:
    """What a program reaches of the rates in a device's file (1: all of it). attention: of peak,
    beside Kernels.attention or the device's own. inner, outer: links inside a node and between
    nodes. latency, inner_latency: between
    nodes, and among devices of one node alone, as multiples of the device file's.

    Of frameworks alone: launch_s, what the host takes to start one kernel; growth, the power of
    their FLOPs that large products gain with. Of emitted programs alone: stragglers, by what part a
    step is longer for each doubling of the devices beyond one node or slice, as all wait for the
    slowest."""

    matmul: float = 1.0
    memory: float = 1.0
    attention: float = 1.0
    inner: float = 1.0
    outer: float = 1.0
    launch_s: float = 10e-6
    growth: float = 0.0
    latency: float = 1.0
    inner_latency: float = 1.0
    stragglers: float = 0.0


@dataclass(frozen=True)
class Hidden:
    """What of a collective's seconds has kernels beside it in the schedules of a program's compiler
    for GPUs, as a share of them, by kind and place (costmodels.overlap).

    gathered: weights of loops over blocks under ZeRO stage 3, gathered in the forward and in the
    backward pass. scattered: their gradients. beside: share of a loop's kernels that those can have
    beside them. updated: share of the optimizer's pass over a weight that new parameters of others
    can be gathered beside. handed_on: what pipeline stages hand to each other. slowed: what kernels
    take longer for each second of a collective beside them.
    """

    gathered: tuple[float, float] = (0.0, 0.0)
    scattered: float = 0.0
    beside: float = 0.0
    updated: float = 0.0
    handed_on: float = 0.0
    slowed: float = 0.0

    @property
    def spared(self) -> float:
        """By how much of a second that hides a step is shorter."""
        return 1 - self.slowed

    def looped(self, phase: str) -> float:
        """Share that hides of a collective of a looped weight: forward | recompute | gradient."""
        forward, backward = self.gathered
        return {"forward": forward, "recompute": backward, "gradient": self.scattered}[phase]


@dataclass(frozen=True)
class Runtime:
    """overlap: fraction of once-a-step gradient traffic hidden under the backward pass.
    fused_traffic: how much of the element-wise traffic is left after fusion, of programs whose
    kernels no set describes. memory_slack: allowance for fragmentation, as a fraction of what is
    allocated. time_spread, memory_spread: how far below and above the price, as fractions of it,
    the printed range goes: one run in ten is below it, one in ten above. optimizer_bytes: traffic
    of the optimizer per local parameter. bucket_bytes: collectives of gradients and of updated
    parameters travel together up to this size, so that each costs its share of a latency. stacked:
    gradients of repeated blocks are reduced as the arrays that hold those of all repeats, so that
    no launch is smaller. partitioned: collectives are placed by the compiler's partitioner, which
    takes no fused attention. copies_hidden: of what can hide where several microbatches run at the
    same time (costmodels.overlap), what does, on accelerators. hidden: what compiled schedules put
    beside kernels, on GPUs. grouped_experts: one kernel multiplies the rows of all experts of a
    device, instead of a loop over blocks of rows.

    rates: what of the device's file is reached; per_device: that of devices with published runs, by
    the device's name, or its kind for all others of it that nobody measured.

    Of frameworks: kernels; generation_kernels: generation of a device
    (costmodels.frameworks.fused_attention) -> other kernels there, and those where linear layers
    compute in eight bits (`on`); gather_overlap: how much of the shorter of arithmetic and of
    gathering weights (ZeRO stage 3) hides under the longer; interleave: virtual stages of each
    pipeline stage; balance: of what stages are assigned even numbers, "parameters", "products"
    (parameters of products alone) or, where it is empty, blocks; overhead_bytes: what a process
    holds beside its tensors; pipeline_slack: memory_slack that a pipeline adds to what is saved of
    microbatches; tensor_overlap: how much of the sums of gradients of what products read, which
    tensor parallelism asks for, hides under the products that follow, those for the weights'
    gradients; wider_sums: how many times as many bytes as a gradient its sum has, which is what is
    sent; blocking: the host waits for each kernel before it starts the next; remakes_modules:
    whether selective recompute makes modules again by their names, and not all that goes element by
    element, as policies do that save what products leave (planner.pricing.frameworks.selective);
    summing_bytes: what adding a gradient to its sum over microbatches moves per local parameter, 0
    where products add to the sum themselves; pinned: fraction of the smaller of two points of the
    backward pass (costmodels.frameworks.peak_memory) that stays allocated in the larger; rows_once:
    a row is sent once to each device, and over the network once to each node, for all of its
    experts there, by kernels made for that (of engines, those of prompts); serves: an engine's,
    whose exchanges of rows are such kernels in any case, in steps with a row for each of its
    experts, and have kernels of the other half of the batch beside them; exchange_slows: what
    kernels take longer for each second of an exchange of experts' rows beside them; flat_rings:
    collectives over several switched levels are rings through all members
    (costmodels.collectives.ring_lines).
    """

    name: str
    overlap: float
    memory_slack: float
    time_spread: tuple[float, float]
    memory_spread: tuple[float, float]
    optimizer_bytes: float
    bucket_bytes: float
    note: str
    fused_traffic: float = 1.0
    kernels: Kernels | None = None
    generation_kernels: Mapping[str, tuple[Kernels, Kernels]] = field(default_factory=dict)
    rates: Rates = field(default_factory=Rates)
    per_device: Mapping[str, Rates] = field(default_factory=dict)
    gather_overlap: float = 0.0
    interleave: int = 1
    overhead_bytes: float = 0.0
    pipeline_slack: float = 0.0
    pinned: float = 0.0
    balance: str = ""
    summing_bytes: float = 0.0
    wider_sums: float = 1.0
    tensor_overlap: float = 0.0
    blocking: bool = False
    remakes_modules: bool = False
    flat_rings: bool = False
    exchange_slows: float = 0.0
    rows_once: bool = False
    serves: bool = False
    stacked: bool = False
    partitioned: bool = False
    copies_hidden: float = 0.0
    grouped_experts: bool = False
    hidden: Hidden = field(default_factory=Hidden)
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    guessed: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def on(self, device: str, eight_bit: bool) -> Runtime:
        """The profile with the kernels that its programs have on a device, by its name."""
        known = self.generation_kernels.get(generation_of(device))
        if known is None:
            return self
        return replace(self, kernels=known[eight_bit], generation_kernels={})


def runtime_names() -> tuple[str, ...]:
    """Known profiles, the default first."""
    return NAMES


def as_framework(name: str) -> bool:
    """Whether a known profile prices programs as a training framework runs them."""
    return name in NAMES and load_runtime(name).kernels is not None


@cache
def load_runtime(name: str) -> Runtime:
    """A shipped profile. KeyError for unknown names (the caller suggests); ValueError for a file
    with a key that is no field."""
    if name not in (*NAMES, *ENGINES):
        raise KeyError(name)
    table = _read(name)
    if kernels := table.pop("kernels", ""):
        table["kernels"] = load_kernels(kernels)
    by_generation = {
        generation: (load_kernels(usual), load_kernels(eight))
        for generation, (usual, eight) in table.pop("generation_kernels", {}).items()
    }
    rates = Rates(**table.pop("rates", {}))
    hidden = Hidden(**_tuples(Hidden, table.pop("hidden", {})))
    per_device = {d: Rates(**row) for d, row in table.pop("per_device", {}).items()}
    return Runtime(
        name=name,
        rates=rates,
        per_device=per_device,
        hidden=hidden,
        generation_kernels=by_generation,
        **_tuples(Runtime, table),
    )


@cache
def load_kernels(name: str) -> Kernels:
    """A set of kernels of costmodels/runtimes/kernel_sets.toml. KeyError for unknown names."""
    tables = _read("kernel_sets")
    table = _over(tables, name)
    table["passes"] = {role: tuple(pair) for role, pair in table["passes"].items()}
    return Kernels(**_tuples(Kernels, table))


def kernel_set_names() -> tuple[str, ...]:
    """Known sets of kernels."""
    return tuple(_read("kernel_sets"))


def _over(tables: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    """The table of a set of kernels, merged over that of its base."""
    overrides = {k: v for k, v in tables[name].items() if k not in ("base", "source")}
    if not (base := tables[name].get("base")):
        return overrides
    table = _over(tables, base)
    for key, value in overrides.items():
        table[key] = {**table[key], **value} if isinstance(value, dict) else value
    return table


def _read(name: str) -> dict[str, Any]:
    with (FOLDER / f"{name}.toml").open("rb") as file:
        return tomllib.load(file)


def _tuples(record: type, table: Mapping[str, Any]) -> dict[str, Any]:
    """A table as arguments of a record: lists become tuples."""
    if unknown := set(table) - {f.name for f in fields(record)}:
        raise ValueError(f"{record.__name__} has no {', '.join(sorted(unknown))}")
    return {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
