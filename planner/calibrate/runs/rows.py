"""Published runs as plans: the model of a row from the zoo, its configuration as the splits of
Megatron (columns, then rows, of each pair of products) or of FSDP, on the machine it ran on, under
the runtime profile of its framework.

Facts that a row lacks take the convention of its source: feed-forward width 4 hidden, vocabulary
51200 (Megatron's GPT). What cannot be expressed (experts, unknown hardware, missing shapes) is left
out with a reason that the report counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from costmodels.capacity import capacity
from costmodels.hardware.device import Device, device_spelled
from costmodels.precision import Recipe, load_recipe
from costmodels.runtimes import SAVED_PRODUCTS, Runtime, load_kernels, load_runtime
from planner.analysis.facts import GraphFacts
from planner.calibrate.runs import gradient_sums, network, xla
from planner.calibrate.runs.mixtures import mixture_of, routing_of
from planner.calibrate.runs.nvidia import as_run, is_recipe, weights
from planner.calibrate.runs.recipes import tpu_recipe_of
from planner.calibrate.runs.releases import as_compiled
from planner.calibrate.runs.splits import REPLICA, SEQUENCE, Left, base_of, splits_of
from planner.errors import PlanError
from planner.execution.plan import Plan
from planner.execution.techniques import BESIDE, WAITING
from planner.machine.mesh_choices import pinned_mesh
from planner.machine.topology import Mesh, Topology, for_devices

Row = Mapping[str, Any]
GATED = ("llama", "mistral", "maxtext", "qwen", "yi-", "gemma")
RECOMPUTE = {"none": "none", "full": "block", "selective": "none"}
BUCKETS = {"mpt": 160e6}
"""Set of kernels -> bytes of its framework's buckets of gradients, where that is not the profile's:
PyTorch's sends them while the backward pass runs; of the order of its default."""
GRAPHED = 0.3
"""Of what kernels of a mixture wait for the host, the part that is left where layers are started
from CUDA graphs."""
LONG = 32768
"""Tokens of a sequence from which on one is a microbatch."""
KERNEL_WORDS = {
    "flash_attention2 + RMS kernel": "flash2-rms",
    "flash_attention2": "flash2",
    "flash_attention": "flash1",
    "flash_attentionv1.0.8": "flash1",
    "fused": "fused",
    "torch": "torch",
}


UNPUBLISHED = {"Hagemann": 12.5e9}
"""Source -> bytes per second of a node's network, where no source says: one 100 Gb/s adapter for
its eight devices, which is what its rows imply (2026-11)."""


ODD = (KeyError, ValueError, TypeError, ArithmeticError, PlanError)
"""What a row of others ends in whose facts are missing, of another kind, or of no model."""


def why_odd(error: Exception) -> str:
    """The reason by which such a row is counted."""
    why = error.what if isinstance(error, PlanError) else f"{type(error).__name__}: {error}"
    return f"cannot be read: {why}"


@dataclass(frozen=True)
class Case:
    """A row ready to be priced. measured_s: of one step, None for a run that ran out of memory;
    recompute: as plans write it, or what it may have been, of which the first that fits is taken;
    on_device: (recompute, offload) of a plan whose memory is that of a compiled program of which
    values wait in the host's memory, None for the plan's own."""

    row: Row
    spec: str
    topology: Topology
    mesh: Mesh
    microbatches: int
    graph_batch: int
    runtime: Runtime
    recipe: Recipe
    measured_s: float | None
    recompute: tuple[str, ...]
    on_device: tuple[str, tuple[str, ...]] | None = None

    @property
    def group(self) -> tuple[Any, ...]:
        """Runs that a planner would choose among: one model, sequence length and number of
        devices; of compiled programs also one release, attention and precision."""
        row = self.row
        software = tuple(str(row.get(k)) for k in xla.SOFTWARE) if xla.is_xla(row) else ()
        return str(row["model"]), int(row["seq"]), int(row["devices"]), *software

    @property
    def usable_bytes(self) -> int:
        """Bytes that a program may allocate; the runs kept nothing free."""
        return capacity(self.topology.device, int(self.row["devices"]), 0).usable


def case_of(row: Row, hardware: str = "") -> Case:
    """The case of a row; on `hardware`, a device by name or file, instead of the one that the row
    names. Raises Left."""
    row = xla.completed(row) if (compiled := xla.is_xla(row)) else completed(row)
    for key in ("layers", "hidden", "heads", "seq", "devices", "global_batch", "microbatch", "dp"):
        if not row.get(key):
            raise Left(f"no {key}")
    tp, pp, cp, dp, micro, batch = (
        int(row.get(k) or 1) for k in ("tp", "pp", "cp", "dp", "microbatch", "global_batch")
    )
    if "per_device_batch_size" in str(
        row.get("notes", "")
    ):  # MaxText counts sequences per chip: those of one replica go through together
        micro *= tp * pp * cp
    if tp * pp * cp * dp != row["devices"]:
        raise Left("degrees do not multiply to the devices")
    if batch % (dp * micro):
        raise Left("batch does not divide into microbatches")
    _leave_unpriced(row)
    zero = level(row)
    unpublished = next((n for word, n in UNPUBLISHED.items() if word in str(row["source"])), 0.0)
    topology = machine(
        str(row["hardware"]), str(row.get("notes", "")), int(row["devices"]), hardware, unpublished
    )
    copies = 1
    if zero == 3:
        copies = xla.copies(row, dp) or replicas(str(row.get("notes", "")), topology, dp)
    experts = experts_axis(row, tp, dp)
    degrees = (
        ("stage", pp),
        (REPLICA, copies),
        ("data", dp // copies // experts),
        ("expert", experts),
        (SEQUENCE, cp),
        ("model", tp),
    )
    try:
        mesh = pinned_mesh(topology, {name: n for name, n in degrees if n > 1} or {"data": 1})
    except PlanError as e:
        raise Left("mesh does not align with the machine") from e
    recipe = recipe_of(row)
    if compiled:
        topology = replace(topology, device=xla.device_of(row, topology.device))
    return Case(
        row=row,
        spec=spec_of(row),
        topology=topology,
        mesh=mesh,
        microbatches=batch // (dp * micro),
        graph_batch=dp * micro,
        runtime=xla.as_multiplied(row, as_compiled(row, load_runtime("jax-shard_map")))
        if compiled
        else runtime_of(row, zero),
        recipe=gradient_sums.held(row, weights(row, recipe)),
        measured_s=measured_s(row),
        recompute=xla.policies(row) if compiled else (recompute_of(row),),
        on_device=xla.left_on_device(row) if compiled else None,
    )


def completed(row: Row) -> dict[str, Any]:
    """A row with what goes without saying: the batch of all replicas where it tells the one of
    each, one sequence a pass where sequences are long."""
    complete = dict(row)
    local = re.search(r"local batch (\d+)", str(row.get("notes", "")))
    if not row.get("global_batch") and local and row.get("dp"):
        complete["global_batch"] = int(local[1]) * int(row["dp"])
    if not row.get("microbatch") and int(row.get("seq") or 0) >= LONG:
        complete["microbatch"] = 1
    return complete


def _leave_unpriced(row: Row) -> None:
    """Raises Left for a row that does what no price covers."""
    model = str(row["model"]).lower()
    if "lora" in str(row.get("notes", "")).lower():
        raise Left("few parameters trained (LoRA)")
    if any(word in model for word in ("gemma2", "gemma3")):
        raise Left("attention within a window")
    experts = ("mixtral", "moe", "a3b", "a22b", "deepseek", "oss", "kimi")
    known = xla.mixture(row) if xla.is_xla(row) else mixture_of(row) and is_recipe(row)
    mixed = any(word in model for word in experts) or int(row.get("ep") or 1) > 1
    if mixed and not known:
        raise Left("experts")


def experts_axis(row: Row, tensor: int, replicas: int) -> int:
    """The degree of the mesh axis over which experts are spread beside the tensor-parallel ranks,
    which have experts of their own, too (Megatron's expert tensor parallelism of one). Raises
    Left."""
    degree = int(row.get("ep") or 1)
    if degree == 1:
        return 1
    if degree % tensor or replicas % (degree // tensor):
        raise Left("experts beside tensor parallelism")
    return degree // tensor


def recipe_of(row: Row) -> Recipe:
    """The precision recipe that a row names. Raises Left for 4 bits."""
    precision = str(row.get("precision") or "bf16").lower()
    if "fp4" in precision:
        raise Left("precision of 4 bits")
    if precision.startswith(("fp8", "mxfp8", "int8")):
        return load_recipe("fp8")
    tpu = tpu_recipe_of(row)
    if "pure" in precision or (tpu and tpu.weights == "bfloat16"):
        return load_recipe("bf16-pure")
    return load_recipe("fp16" if precision == "fp16" else "bf16-mixed")


def kernels_of(row: Row, zero: int) -> str:
    """A set of kernels: the set that the row names, else its framework's. Megatron's runs on V100
    and A100 are those of before flash attention."""
    word, source, hardware = (str(row.get(k) or "") for k in ("kernel", "source", "hardware"))
    if word in KERNEL_WORDS:
        return KERNEL_WORDS[word]
    if zero < 3 and any(card in hardware for card in ("V100", "A100")):
        return "fused-norm"
    if "mosaicml" in source:
        return "mpt"
    if "nanotron" in source.lower():  # Triton's norms, an eager loss and eager gated units
        return "fsdp"
    if zero == 3 and not is_recipe(row):
        return "fsdp"
    if mixture_of(row) and routing_of(row).graphs == "whole":
        return "nvidia-grouped"
    return "nvidia-fp8" if "fp8" in str(row.get("precision") or "").lower() else "nvidia"


def level(row: Row) -> int:
    """ZeRO stage; where a row of NVIDIA's recipes is silent, FSDP if its notes say so, else
    their distributed optimizer."""
    if row.get("zero") is None and re.search(r"\bFSDP=[1-9]", str(row.get("notes", ""))):
        return 3
    return int(row.get("zero") or 0) if row.get("zero") is not None or not is_recipe(row) else 1


def sequence_parallel(row: Row) -> bool:
    """Whether what lies between products is cut along the sequence; NVIDIA's recipes do so wherever
    they cut products."""
    recorded = row.get("sequence_parallel")
    return bool(recorded) if recorded is not None or not is_recipe(row) else True


def recompute_of(row: Row) -> str:
    """What a framework's run recomputes, as plans write it."""
    return RECOMPUTE.get(str(row.get("recompute") or "none"), "none")


def replicas(notes: str, topology: Topology, data: int) -> int:
    """How many copies of the sharded parameters there are: nodes or slices that each hold all of
    them."""
    match = re.search(r"dcn_data_parallelism=(\d+)", notes) or re.search(
        r"(\d+) slice\(s\) x", notes
    )
    copies = (
        int(match[1])
        if match
        else topology.levels[-1].size
        if "HSDP" in notes and len(topology.levels) > 1
        else 1
    )
    return copies if data % copies == 0 else 1


def runtime_of(row: Row, zero: int) -> Runtime:
    """The profile of the framework, with the kernels and chunks of the run."""
    profile = load_runtime("fsdp" if zero == 3 else "megatron")
    kernels = load_kernels(kernels_of(row, zero))
    notes = str(row.get("notes", ""))
    if "offload" in notes.replace(
        "cpu_offload False",
        "",
        # what blocks leave goes to the host's memory; times of such runs leave no room to make it
        # again
    ):
        kernels = replace(kernels, saved={})
    elif row.get("recompute") == "selective":
        # torchtitan's policy keeps every second product (torchtitan, activation checkpointing per
        # operator).
        half = 0.5 if "torchtitan" in str(row["source"]) else 0.0
        saved = {
            name: n * (1 - half if "attention" not in name else 1.0)
            for name, n in SAVED_PRODUCTS.items()
        }
        kernels = (
            replace(kernels, saved=saved, recomputed=(half, 1.0))
            if kernels.flash
            else replace(kernels, recomputes_scores=True)
        )
    profile = replace(
        profile,
        kernels=kernels,
        generation_kernels={},
        bucket_bytes=BUCKETS.get(kernels_of(row, zero), profile.bucket_bytes),
        interleave=int(row.get("vpp") or 1),
        balance="parameters" if "Hagemann" in str(row["source"]) else "",
        tensor_overlap=profile.tensor_overlap * ("Hagemann" not in str(row["source"])),
    )
    return gradient_sums.as_run(row, as_run(row, zero, as_routed(row, profile)))


def as_routed(row: Row, profile: Runtime) -> Runtime:
    """The profile with what the recipe of a mixture's row does (planner.calibrate.runs.mixtures).
    In a step that is captured whole no kernel waits for the host."""
    if mixture_of(row) is None:
        return profile
    assert profile.kernels is not None
    routing = routing_of(row)
    waits = {"layers": GRAPHED}.get(routing.graphs, 1.0)
    kernels = replace(profile.kernels, expert_waits_s=profile.kernels.expert_waits_s * waits)
    return replace(profile, kernels=kernels, rows_once=routing.flex)


@lru_cache(maxsize=256)
def machine(
    hardware: str, notes: str, devices: int, device: str = "", node_bytes_per_s: float = 0.0
) -> Topology:
    """The machine of a row (of `device`, where one is given), with the network between nodes
    that the source names, else of node_bytes_per_s where that is above 0. Raises Left."""
    name = device or device_spelled(hardware)
    if not name:
        raise Left(f"hardware {hardware.split(' ')[0]}")
    try:
        topology = for_devices(name, devices)
    except PlanError as e:
        raise Left("devices do not fill nodes") from e
    if match := re.search(r"H100 (\d+)GB HBM", hardware):
        topology = replace(
            topology, device=replace(topology.device, memory_bytes=int(match[1]) * 10**9)
        )
    if match := re.search(r"([\d.]+)TB/s", hardware):
        topology = replace(
            topology, device=replace(topology.device, memory_bytes_per_s=float(match[1]) * 1e12)
        )
    if match := re.search(r"(\d+)W\b", hardware):
        topology = replace(topology, device=capped(topology.device, float(match[1])))
    size = topology.device.node_size
    rate = network.bytes_per_s(hardware, notes, size) or node_bytes_per_s / size
    if rate and len(topology.levels) > 1 and topology.device.kind == "gpu":
        topology = replace(
            topology,
            levels=(
                *topology.levels[:-1],
                replace(
                    topology.levels[-1],
                    bandwidth_bytes_per_s=rate,
                    efficiency=network.efficiency(hardware) or topology.levels[-1].efficiency,
                ),
            ),
        )
    return topology


def capped(device: Device, watts: float) -> Device:
    """A device that may draw fewer watts than its file says: the clock falls with the voltage, so
    that power goes as its cube (CMOS logic); products and attention feel it."""
    clock = min(1.0, (watts / device.watts) ** (1 / 3)) if device.watts else 1.0
    return replace(
        device, peak_flops_per_s={t: x * clock for t, x in device.peak_flops_per_s.items()}
    )


def spec_of(row: Row) -> str:
    """The zoo's name for the model of a row."""
    if spec := xla.encoder_decoder(row) or xla.mixture(row):
        return spec
    if mixture := mixture_of(row):
        return f"{mixture.spec},seq={int(row['seq'])}"
    layers, hidden, heads, seq = (int(row[k]) for k in ("layers", "hidden", "heads", "seq"))
    vocab = int(row.get("vocab") or 51200)
    ffn = int(row.get("ffn") or 4 * hidden)
    if not any(word in str(row["model"]).lower() for word in GATED):
        return f"zoo:gpt,layers={layers},hidden={hidden},heads={heads},seq={seq},vocab={vocab},ff={ffn}"  # noqa: E501
    kv = int(row.get("kv_heads") or heads)
    width = hidden // heads
    if row.get("params"):  # heads wider than hidden / heads show in the number of parameters
        rest = float(row["params"]) - 2.0 * vocab * hidden - 3.0 * layers * hidden * ffn
        width = min(
            (width, 64, 128, 256),
            key=lambda w: abs(rest - 2.0 * layers * hidden * w * (heads + kv)),
        )
    return f"zoo:llama3-8b,layers={layers},hidden={hidden},heads={heads},kv_heads={kv},seq={seq},vocab={vocab},ff={ffn},head_dim={width}"  # noqa: E501


def measured_s(row: Row) -> float | None:
    """Seconds of one step as measured. Raises Left for a metric of another kind."""
    metric = row["metric"]
    if metric == "oom":
        return None
    value = float(row["value"])
    tokens = float(row["global_batch"]) * float(row["seq"])
    if metric == "step_time_s":
        return value
    if metric == "tokens_per_s_per_device":
        return tokens / (value * float(row["devices"]))
    if metric == "tflops_per_device":
        return model_flops(row) / (value * 1e12 * float(row["devices"]))
    if metric == "block_time_s":  # MLPerf's: so many steps and one evaluation, forward alone
        forward = 1 / 4 if row.get("recompute") == "full" else 1 / 3
        evaluated = float(row["eval_sequences"]) / float(row["global_batch"])
        return value / (float(row["steps_per_block"]) + forward * evaluated)
    raise Left(f"metric {metric}")


def model_flops(row: Row) -> float:
    """FLOPs of a step as sources count them: six per parameter of products and token, attention
    without a mask, nothing computed again."""
    if xla.encoder_decoder(row):
        return xla.encoder_decoder_flops(row)
    layers, hidden, heads, seq = (int(row[k]) for k in ("layers", "hidden", "heads", "seq"))
    kv, ffn, vocab = (
        int(row.get("kv_heads") or heads),
        int(row.get("ffn") or 4 * hidden),
        int(row.get("vocab") or 51200),
    )
    spec, mixed = spec_of(row), mixture_of(row)
    wide = re.search(r"head_dim=(\d+)", spec)
    width = int(wide[1]) if wide else hidden // heads
    ffn = mixed.active if mixed else ffn
    products = (
        layers * hidden * (2 * width * (heads + kv) + (3 if wide or mixed else 2) * ffn)
        + vocab * hidden
    )
    return float(row["global_batch"]) * seq * (6.0 * products + 12.0 * layers * heads * width * seq)


def plan_of(case: Case) -> tuple[GraphFacts, Plan]:
    """The configuration of a row as a plan. Raises Left where a split is not possible."""
    row, base = case.row, base_of(case.spec, case.graph_batch)
    zero = level(row)
    whole_logits = "Hagemann" in str(
        row["source"]
    )  # its loss takes whole rows of logits (kernels and memory of its runs say so)
    splits = splits_of(case.spec, case.graph_batch, case.mesh, sequence_parallel(row), whole_logits)
    shape = case.mesh.shape
    data = tuple(a for a, n in shape if a in ("data", "expert", SEQUENCE) and n > 1)
    mixed = not xla.is_xla(row) and mixture_of(row) is not None
    return base, Plan(
        mesh=shape,
        splits=splits,
        repeated_blocks=base.runs,
        zero_stage=zero if data else 0,
        zero_axes=data if zero else (),
        recompute=case.recompute[0],
        microbatches=case.microbatches,
        schedule="1f1b" if case.mesh.stages > 1 else "",
        exchanges=BESIDE if mixed and routing_of(row).overlapped else WAITING,
    )
