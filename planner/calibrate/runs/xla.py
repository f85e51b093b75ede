"""Published runs of XLA programs (MaxText, PaxML, T5X, Levanter, torch_xla) as plans of our own:
they are compiled as emitted programs are, so that the default profile prices them, with the
attention and the recomputation that a row names.

Facts that rows lack take the convention of their framework: MaxText gives sequences a device in one
pass; its devices are JAX's, two of a chip of TPU7x. Its `custom` policies save or offload the
results of a block's attention products (AI-Hypercomputer/tpu-recipes, recipes of Trillium).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from costmodels.hardware.device import Device
from costmodels.runtimes import Runtime
from planner.calibrate.runs.mixtures import mixture_of
from planner.calibrate.runs.recipes import tokamax, tpu_recipe_of
from planner.calibrate.runs.releases import release_of
from planner.execution.save_policies import BLOCK, PRESETS, saving

Row = Mapping[str, Any]
FRAMEWORKS = ("MaxText", "tpu-recipes", "Levanter", "PaxML", "Pax (", "T5X")
"""Words of sources whose programs XLA compiles, where rows do not say so."""
RUNTIMES = ("jax", "torch_xla")
SOFTWARE = ("date", "attention", "precision")
"""Facts of a row that say which program it is, where the configuration is the same."""
_QKVO = saving(("q", "k", "v", "out_proj"))
PRODUCTS = "SAVE_DOT_ONLY"
"""A policy that saves what products make: of plain attention its context too, of a fused kernel,
which is no product to jax (`checkpoint_dots`), nothing."""
POLICIES = {
    **{name: saving(names) for name, names in PRESETS.items()},
    PRODUCTS: saving(PRESETS["minimal_with_context"]),
    "SAVE_DOT_WITH_NO_BATCH_DIM": saving(PRESETS["minimal"]),
    "SAVE_NOTHING": BLOCK,
    "recompute_all": BLOCK,
    "qkv_proj_offloaded": saving(("q", "k", "v")),
    "custom": _QKVO,
    "none": "none",
}
"""A word of a row's policy -> what our plans call it. PaxML's are jax's own: every product, or
every one without a batch dimension."""
RECOMPUTE = {"none": "none", "selective": _QKVO, "full": BLOCK}
UNFUSED = re.compile(r"^XLA$|vanilla|^XLA \(|without flash", re.IGNORECASE)
"""Of a row's `attention`: plain products whose scores pass through memory."""
EIGHT_BIT = 2.0
"""Peak of eight-bit integer products over that of bf16, on TPUs from v5e on (Google Cloud TPU
documentation)."""

SPLIT_BACKWARD = 7 / 5
"""Products of Splash's backward pass in two kernels, which is what plans count, over those of its
one kernel."""


def is_xla(row: Row) -> bool:
    """Whether XLA compiled a row's program: all that run on TPUs, and those of its frameworks."""
    if runtime := row.get("runtime"):
        return runtime in RUNTIMES
    on_tpus = "tpu" in str(row.get("hardware") or "").lower()
    return on_tpus or any(word in str(row["source"]) for word in FRAMEWORKS)


def completed(row: Row) -> dict[str, Any]:
    """A row with the facts that its framework's convention gives: devices as JAX counts them, the
    degree of data parallelism, sequences of one pass of a replica."""
    complete = dict(row)
    tp, pp, cp = (int(row.get(k) or 1) for k in ("tp", "pp", "cp"))
    chips = "devices = CHIPS" in str(row.get("notes", ""))
    devices = int(row.get("devices") or 0) * (2 if chips else 1)
    complete |= {"devices": devices, "tp": tp, "pp": pp, "cp": cp}
    if chips or not row.get("dp"):
        complete["dp"] = max(1, devices // (tp * pp * cp))
    if not row.get("microbatch") and row.get("global_batch") and pp == 1:
        complete["microbatch"] = max(1, int(row["global_batch"]) // complete["dp"])
    if row.get("zero") is None:
        complete["zero"] = 3
    return complete


def copies(row: Row, data: int) -> int:
    """How many groups of devices hold all sharded parameters each; 0 where a row does not say."""
    mesh = {k: v for k, v in (row.get("mesh") or {}).items() if isinstance(v, int)}
    sharded = [n for k, n in mesh.items() if "fsdp" in k]
    if not mesh or not sharded:
        return 0
    n = 1
    for name, size in mesh.items():
        n *= size if name in ("data", "dcn_data", "ici_data", "replica") else 1
    return n if data % n == 0 else 0


def policies(row: Row) -> tuple[str, ...]:
    """What a row's program recomputes, as plans write it: one policy, or all that it may have had
    where the row does not say, the least recomputation first."""
    if recipe := tpu_recipe_of(row):
        return (saving((*recipe.saved, *recipe.away)),)
    match = re.search(r"remat[= ](\w+)", str(row.get("notes", "")))
    policy = str(row.get("remat_policy") or (match[1] if match else ""))
    if PRODUCTS in policy and not unfused(row):
        return (saving(PRESETS["minimal"]),)
    for word in sorted(POLICIES, key=len, reverse=True):
        if word in policy:
            return (POLICIES[word],)
    stated = RECOMPUTE.get(str(row.get("recompute")))
    return (stated,) if stated else tuple(RECOMPUTE.values())


def left_on_device(row: Row) -> tuple[str, tuple[str, ...]] | None:
    """(what a plan recomputes, what it offloads) of a plan whose memory is that of a row's program;
    None for what its policy says. Of a policy of values in the host's memory that no recipe tells,
    blocks' inputs are taken to wait there, too."""
    if recipe := tpu_recipe_of(row):
        inputs = ("activations",) if recipe.inputs else ()
        return saving(recipe.saved, recipe.away), inputs
    text = str(row.get("remat_policy") or "") + str(row.get("notes", ""))
    if "offload" in text.replace("offloads may differ", "") or "custom" in text:
        return BLOCK, ("activations",)
    return None


def unfused(row: Row) -> bool:
    """Whether a row's attention is plain products: by its words or its release
    (planner.calibrate.runs.releases). T5X had no other, nor has PaxML's configuration of 126M
    parameters."""
    attention = str(row.get("attention") or "")
    if UNFUSED.search(attention) or "without flash attention" in str(row.get("notes", "")):
        return True
    if (release := release_of(row)) and release.unfused:
        return True
    if row.get("framework") == "PaxML" and "126M" in str(row["model"]):
        return True
    return not attention and "T5X" in str(row.get("framework") or row["source"])


def device_of(row: Row, device: Device) -> Device:
    """The device with what a row's program finds there: its attention, and the peak of eight-bit
    integers."""
    if unfused(row):
        device = replace(device, attention=None)
    elif device.attention and (kernel := _kernel(row)):
        forward, backward = device.attention.forward, device.attention.backward
        if kernel == "tokamax":
            forward, backward = ((rate,) * len(forward) for rate in tokamax())
        backward = tuple(SPLIT_BACKWARD * rate for rate in backward)
        device = replace(
            device, attention=replace(device.attention, forward=forward, backward=backward)
        )
    eight = "float8_e4m3fn"
    if "int8" in str(row.get("precision") or "") and eight not in device.peak_flops_per_s:
        peaks = dict(device.peak_flops_per_s)
        device = replace(device, peak_flops_per_s=peaks | {eight: EIGHT_BIT * peaks["bfloat16"]})
    return device


def _kernel(row: Row) -> str:
    """The attention of a row on TPUs, as costmodels/runtimes/tpu_recipes.toml has it: of its
    recipe, or its own word."""
    recipe = tpu_recipe_of(row)
    if recipe and recipe.attention:
        return recipe.attention
    return "tokamax" if "tokamax" in str(row.get("attention") or "") else ""


def mixture(row: Row) -> str:
    """The zoo's name for a mixture of experts of a row, "" for others and for those that the zoo
    does not write as they are (windows and sinks of gpt-oss, Grug)."""
    known = mixture_of(row)
    if known is None or not known.exact:
        return ""
    dropping = ",form=capacity" if drops(row) else ""
    return f"{known.spec},seq={int(row['seq'])}{dropping}"


def drops(row: Row) -> bool:
    """Whether a row's experts take 1.25 times the mean and drop what is beyond, dispatched by
    one-hot products: Trillium's recipes of Mixtral (mixtral_8x7b_dropped and mixtral_8x22b_dropped
    of MaxText's benchmarks/maxtext_trillium_model_configs.py)."""
    source, name = str(row.get("source")), str(row["model"]).lower()
    return "tpu-recipes TPU v6e" in source and "mixtral" in name


def as_multiplied(row: Row, runtime: Runtime) -> Runtime:
    """The profile with the experts' products of a row's program: one kernel for the rows of all
    experts in MaxText (megablox, tokamax), where it drops nothing."""
    grouped = bool(mixture(row)) and not drops(row)
    return replace(runtime, grouped_experts=grouped)


def encoder_decoder(row: Row) -> str:
    """The zoo's name for a T5 of a row, "" for other models."""
    if not row.get("decoder_layers"):
        return ""
    sizes = {
        "layers": row["encoder_layers"],
        "decoder_layers": row["decoder_layers"],
        "hidden": row["hidden"],
        "heads": row["heads"],
        "head_dim": row["head_dim"],
        "ff": row["ffn"],
        "vocab": row["vocab"],
        "seq": row["seq"],
        "target": row["decoder_seq"],
    }
    facts = ",".join(f"{k}={int(v)}" for k, v in sizes.items())
    return f"zoo:t5-large,{facts},ff_form=gated-gelu,tied=0"


def encoder_decoder_flops(row: Row) -> float:
    """FLOPs of a step of a T5: six for each parameter of a product and position that goes through
    it, attention without a mask."""
    hidden, width = int(row["hidden"]), int(row["heads"]) * int(row["head_dim"])
    source, target = int(row["seq"]), int(row["decoder_seq"])
    mlp = 3 * hidden * int(row["ffn"])
    encoder = source * (4 * hidden * width + mlp) + 2 * width * source**2
    cross = 2 * hidden * width * (source + target) + 2 * width * source * target
    decoder = target * (4 * hidden * width + mlp) + cross + 2 * width * target**2
    products = int(row["encoder_layers"]) * encoder + int(row["decoder_layers"]) * decoder
    head = target * hidden * int(row["vocab"])
    return 6.0 * float(row["global_batch"]) * (products + head)
