"""Mixtures of experts of published rows, as the zoo writes them, and what NVIDIA's recipes do with
them that tables of results do not say.

Sizes as the models' cards have them (Qwen3, GPT-OSS, Kimi K2). GPT-OSS attends to everything in all
layers here, without sinks: windows are half of its layers'.

Recipes: NVIDIA-NeMo/Megatron-Bridge, `scripts/performance/configs` of v0.2.0 to v0.5.1 and
`src/megatron/bridge/perf_recipes` of 067f987, which are its containers 25.11 to 26.08: where
kernels are started from CUDA graphs (`cuda_graph_impl`), which dispatcher sends rows
(`moe_flex_dispatcher_backend`) and whether other products run beside it (`moe_a2a_overlap`). Read
in 2026-11.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
QWEN = "zoo:mixtral-8x7b,kv_heads=4,head_dim=128,experts=128,top=8,vocab=151936"


@dataclass(frozen=True)
class Mixture:
    """part: of a row's model, in lower case and with hyphens. spec: the zoo's name. active: width
    of all experts that a token goes through. exact: whether the zoo writes it as it is."""

    part: str
    spec: str
    active: int
    exact: bool = True


MIXTURES = (
    Mixture("mixtral-8x7b", "zoo:mixtral-8x7b", 2 * 14336),
    Mixture("mixtral-8x22b", "zoo:mixtral-8x22b", 2 * 16384),
    Mixture("deepseek-v3", "zoo:deepseek-v3", 9 * 2048),
    Mixture("deepseekv3", "zoo:deepseek-v3", 9 * 2048),
    Mixture(
        "kimi-k2",
        "zoo:deepseek-v3,heads=64,kv_heads=64,experts=384,dense_layers=1,vocab=163840",
        9 * 2048,
    ),
    Mixture(
        "qwen3-235b-a22b",
        f"{QWEN},layers=94,hidden=4096,heads=64,expert_ff=1536,ff=12288",
        8 * 1536,
    ),
    Mixture(
        "qwen3-30b-a3b", f"{QWEN},layers=48,hidden=2048,heads=32,expert_ff=768,ff=6144", 8 * 768
    ),
    Mixture(
        "gpt-oss-120b",
        "zoo:mixtral-8x7b,layers=36,hidden=2880,heads=64,kv_heads=8,head_dim=64,experts=128,top=4,"
        "ff=2880,vocab=201088",
        4 * 2880,
        exact=False,
    ),
)


def mixture_of(row: Row) -> Mixture | None:
    """The mixture that a row trains; None for others."""
    name = re.sub(r"[_ ]", "-", str(row["model"]).lower())
    return next((m for m in MIXTURES if m.part in name), None)


@dataclass(frozen=True)
class Routing:
    """How a run of Megatron treats experts. graphs: what is started from CUDA graphs, "none",
    "layers" (attention and the router) or "whole" (the whole step, experts' products in one
    kernel). flex: a dispatcher that sends a row to a device once. overlapped: exchanges run beside
    products of another microbatch."""

    graphs: str
    flex: bool
    overlapped: bool


FIRST_WHOLE = "26.06"
"""The first container whose recipes capture the whole step, in MXFP8 on these devices."""
WHOLE = ("gb200", "gb300", "b300")
LAYERS = {
    "deepseek-v3": ("gb200", "b200 ep32"),
    "kimi-k2": (),
    "qwen3-235b-a22b": ("gb200", "gb300"),
    "qwen3-30b-a3b": ("gb200", "gb300", "b200", "b300"),
    "gpt-oss-120b": ("gb300", "b300"),
}
"""Mixture -> devices whose recipes start layers from CUDA graphs, since 25.11."""
PLAIN = {
    ("qwen3-235b-a22b", "b200"): ("25.09", "25.11", "26.02", "26.04", "26.04.01"),
    ("qwen3-235b-a22b", "b300"): ("26.02", "26.04"),
    ("qwen3-30b-a3b", "b200"): ("25.09", "25.11", "26.02"),
    ("gpt-oss-120b", "b200"): ("25.11", "26.02"),
    ("gpt-oss-120b", "b300"): ("26.02",),
    ("gpt-oss-120b", "gb200"): ("25.11", "26.02", "26.02.01"),
}
"""(mixture, device) -> containers whose recipes send rows by NCCL's all-to-all."""
PLAIN_ALWAYS = (("gpt-oss-120b", "h100"), ("gpt-oss-120b", "gb300"))
"""Those whose recipes do in all containers, but where they capture the whole step."""
OVERLAPPED = {
    ("qwen3-235b-a22b", "h100"): "",
    ("gpt-oss-120b", "gb200"): "26.04",
    ("deepseek-v3", "b200 ep32"): "",
}
"""(mixture, device) -> the first container whose recipes overlap exchanges, "" for all."""


def routing_of(row: Row) -> Routing:
    """What the recipe of a row of NVIDIA's does."""
    mixture = mixture_of(row)
    name = "" if mixture is None else mixture.part.replace("deepseekv3", "deepseek-v3")
    device = str(row["hardware"]).lower().removeprefix("dgx-").split(" ")[0]
    wide = f"{device} ep{int(row.get('ep') or 1)}"
    match = re.search(r"release '([\d.]+)", str(row.get("notes", "")))
    container = match[1] if match else FIRST_WHOLE
    precision = str(row.get("precision") or "").lower()
    whole = container >= FIRST_WHOLE and device in WHOLE and name != "kimi-k2"
    if whole and precision.startswith("mxfp8"):
        return Routing("whole", True, True)
    graphed = LAYERS.get(name, ())
    since = OVERLAPPED.get((name, device), OVERLAPPED.get((name, wide)))
    return Routing(
        graphs="layers" if device in graphed or wide in graphed else "none",
        flex=container not in PLAIN.get((name, device), ()) and (name, device) not in PLAIN_ALWAYS,
        overlapped=since is not None and container >= since,
    )
