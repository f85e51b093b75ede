"""The rows of `benchmarks.techniques`: every technique alone on six kinds of model, and
combinations drawn at random."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

DEVICES = 8
GPT, LLAMA, MIXTRAL, T5 = (
    "zoo:gpt-tiny,layers=4,seq=32",
    "zoo:llama-tiny,layers=4",
    "zoo:mixtral-tiny,layers=4",
    "zoo:t5-tiny",
)
RESNET, UNET = "zoo:resnet-tiny", "zoo:unet-tiny"
DEEP = "zoo:gpt-tiny,layers=8,seq=32"
MODELS = (GPT, LLAMA, MIXTRAL, T5, RESNET, UNET)
BLOCKS = (GPT, LLAMA, MIXTRAL, T5)
"""Models of blocks that all repeats share: they can be dealt out over stages and recomputed. Others
are cut into stages of their own."""


@dataclass(frozen=True)
class Row:
    """A technique on a model. less: the technique whose memory, on the same model and batch, is to
    be above this one's. nodes: pins of operators by glob. options: of `planner.plan` beside
    pins."""

    what: str
    source: str
    pins: str
    less: str = ""
    batch: int = 16
    nodes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[object, ...]:
        """What tells rows apart, as plain data."""
        return (
            self.what,
            self.source,
            self.pins,
            self.batch,
            repr(dict(self.nodes)),
            repr(dict(self.options)),
        )


LARGE = 64
"""The batch of rows whose memory is that of activations: at 16 parameters and their state are most
of it."""
EVERYWHERE = (
    ("data parallel", "dp=8,zero=0,micro=1", "", MODELS, 16),
    ("operator-level, simple", "dp=2,tp=4,zero=0,micro=1", "data parallel", BLOCKS, 16),
    ("operator-level, simple", "dp=2,tp=4,zero=0,micro=1", "", (RESNET, UNET), 16),
    (
        "operator-level, columns and rows",
        "dp=2,tp=4,zero=0,micro=1,tensor=megatron",
        "data parallel",
        BLOCKS,
        16,
    ),
    (
        "operator-level, columns, rows and positions",
        "dp=2,tp=4,zero=0,micro=1,tensor=megatron-sp",
        "operator-level, columns and rows",
        BLOCKS,
        16,
    ),
    ("operator-level, higher order", "dp=2,model=2,model2=2,zero=0,micro=1", "", MODELS, 16),
    (
        "operator-level, three axes",
        "model=2,model2=2,model3=2,micro=1",
        "",
        (GPT, LLAMA, RESNET),
        16,
    ),
    ("optimizer parallel, ZeRO stage 1", "dp=8,zero=1,micro=1", "data parallel", MODELS, 16),
    ("optimizer parallel, ZeRO stage 1, accumulated", "dp=8,zero=1,micro=2", "", (GPT, LLAMA), 16),
    (
        "optimizer parallel, ZeRO stage 2",
        "dp=8,zero=2,micro=2",
        "optimizer parallel, ZeRO stage 1, accumulated",
        BLOCKS,
        16,
    ),
    ("optimizer parallel, ZeRO stage 2", "dp=8,zero=2,micro=2", "", (RESNET,), 32),
    ("optimizer parallel, ZeRO stage 3", "dp=8,zero=3,micro=1", "data parallel", MODELS, 16),
    ("gradient accumulation", "dp=4,tp=2,micro=2", "", MODELS, 16),
    ("data parallel", "dp=8,zero=0,micro=1", "", BLOCKS, LARGE),
    ("microbatch overlap", "dp=2,tp=4,zero=1,micro=2,copies=2,tensor=megatron", "", BLOCKS, 16),
    (
        "gradient accumulation, data parallel",
        "dp=8,zero=0,micro=4",
        "data parallel",
        (GPT, LLAMA, T5),
        LARGE,
    ),
    ("recompute a block", "dp=8,zero=0,micro=1,recompute=block", "data parallel", BLOCKS, LARGE),
    (
        "recompute, collectives saved",
        "dp=2,tp=4,zero=0,micro=1,recompute=block-keep",
        "operator-level, simple",
        BLOCKS,
        16,
    ),
    ("pipeline, 1F1B", "pp=2,dp=4,micro=4,zero=0,schedule=1f1b", "", BLOCKS, 16),
    (
        "stages, tensor, data, levels and recompute in one",
        "pp=2,dp=2,tp=2,micro=4,zero=2,recompute=block",
        "",
        BLOCKS,
        16,
    ),
    ("chosen, nothing pinned", "", "", MODELS, 16),
)
"""(technique, pins, whose memory is above its own, models, batch)."""
RING, HEADS = (
    {"*Attention": {"split": {"ring": ["sequence"]}}},
    {"*Attention": {"split": {"b": ["data"], "g": ["sequence"]}}},
)
EXPERTS = {"*experts*": {"split": {"expert-b": ["expert"]}}}
FEED_FORWARD = {
    "*.up_proj.weight": {"layout": [[], ["tensor"]]},
    "*.gate_proj.weight": {"layout": [[], ["tensor"]]},
    "*.down_proj.weight": {"layout": [["tensor"], []]},
}
SPECIAL = (
    Row("data parallel", MIXTRAL, "dp=8,zero=0,micro=1", batch=256),
    Row(
        "gradient accumulation, data parallel",
        MIXTRAL,
        "dp=8,zero=0,micro=8",
        less="data parallel",
        batch=256,
    ),  # whose sums of gradients are large
    Row("operator-level, one axis of all devices", GPT, "tp=8,micro=1", less="data parallel"),
    Row("sequence parallel", GPT, "sequence=2,dp=4,micro=1"),
    Row("attention on a ring", GPT, "sequence=8,micro=1", nodes=RING),
    Row("attention on a ring", LLAMA, "sequence=4,dp=2,micro=1", nodes=RING),
    Row("attention on a ring", T5, "sequence=2,dp=4,micro=1", nodes=RING),
    Row(
        "attention by all-to-all, positions to heads and back",
        GPT,
        "sequence=4,dp=2,micro=1",
        nodes=HEADS,
    ),
    Row(
        "attention by all-to-all, positions to heads and back",
        LLAMA,
        "sequence=2,dp=4,micro=1",
        nodes=HEADS,
    ),
    Row(
        "experts on devices, tokens routed",
        "zoo:mixtral-tiny",
        "expert=2,dp=4,micro=1",
        nodes=EXPERTS,
    ),
    Row(
        "experts on devices, tokens routed",
        "zoo:mixtral-tiny",
        "expert=2,dp=2,tp=2,micro=2",
        nodes=EXPERTS,
    ),
    Row(
        "experts on devices, tokens routed",
        "zoo:deepseek-tiny",
        "expert=2,dp=4,micro=1",
        nodes=EXPERTS,
    ),
    Row("rows of images", UNET, "sequence=4,dp=2,micro=1", batch=4),
    Row(
        "optimizer parallel, ZeRO stage 1 in groups",
        GPT,
        "dp=8,zero=1,zero_group=4,micro=1",
        less="data parallel",
    ),
    Row("optimizer parallel, ZeRO stage 2 in groups", T5, "dp=8,zero=2,zero_group=2,micro=2"),
    Row(
        "optimizer parallel, ZeRO stage 3 in groups",
        GPT,
        "dp=8,zero=3,zero_group=4,micro=1",
        less="data parallel",
    ),
    Row(
        "optimizer parallel, ZeRO stage 3 in groups",
        LLAMA,
        "dp=8,zero=3,zero_group=4,micro=1",
        less="data parallel",
    ),
    Row("pipeline, GPipe", GPT, "pp=4,dp=2,micro=8,schedule=gpipe,zero=0"),
    Row("pipeline, GPipe", LLAMA, "pp=4,dp=2,micro=8,schedule=gpipe,zero=0"),
    Row(
        "pipeline, 1F1B of four stages",
        GPT,
        "pp=4,dp=2,micro=8,zero=0,schedule=1f1b",
        less="pipeline, GPipe",
    ),
    Row(
        "pipeline, 1F1B of four stages",
        LLAMA,
        "pp=4,dp=2,micro=8,zero=0,schedule=1f1b",
        less="pipeline, GPipe",
    ),
    Row("pipeline, zero bubble", GPT, "pp=4,dp=2,micro=8,zero=0,schedule=zb-h1"),
    Row("pipeline, zero bubble", LLAMA, "pp=2,tp=2,dp=2,micro=4,zero=1,schedule=zb-h1"),
    Row("pipeline, zero bubble", "zoo:mixtral-tiny,layers=4", "pp=2,dp=4,micro=4,schedule=zb-h1"),
    Row("pipeline, interleaved", DEEP, "pp=4,dp=2,micro=8,zero=0,virtual=2"),
    Row("pipeline, interleaved", "zoo:llama-tiny,layers=8", "pp=4,dp=2,micro=8,zero=1,virtual=2"),
    Row("pipeline, interleaved", "zoo:mixtral-tiny,layers=8", "pp=2,dp=4,micro=4,zero=0,virtual=2"),
    Row(
        "pipeline, interleaved, four virtual stages",
        DEEP,
        "pp=2,tp=2,dp=2,micro=4,zero=2,recompute=block,virtual=4",
    ),
    Row("pipeline, uneven stages", "zoo:gpt-tiny,layers=5", "pp=4,dp=2,micro=4"),
    Row("pipeline, uneven stages", "zoo:llama-tiny,layers=5", "pp=2,dp=4,micro=4"),
    Row("pipeline, uneven stages", "zoo:t5-tiny,layers=3", "pp=2,dp=4,micro=4"),
    Row(
        "pipeline, encoder and decoder, interleaved",
        "zoo:t5-tiny,layers=4",
        "pp=2,tp=2,dp=2,micro=4,virtual=2",
    ),
    Row(
        "pipeline, uneven stages, GPipe",
        RESNET,
        "pp=4,dp=2,micro=16,zero=0,schedule=gpipe",
        batch=64,
    ),
    Row(
        "pipeline, uneven stages, 1F1B",
        RESNET,
        "pp=4,dp=2,micro=16,zero=0,schedule=1f1b",
        less="pipeline, uneven stages, GPipe",
        batch=64,
    ),
    Row(
        "pipeline, uneven stages, tensor, data and ZeRO in one",
        RESNET,
        "pp=2,dp=2,tp=2,micro=4,zero=2,schedule=1f1b",
    ),
    Row("pipeline, uneven stages, interleaved", RESNET, "pp=4,dp=2,micro=8,zero=0,virtual=2"),
    Row(
        "pipeline, uneven stages, interleaved, four virtual stages",
        RESNET,
        "pp=2,dp=2,tp=2,micro=4,zero=2,virtual=4",
    ),
    Row(
        "pipeline, stages of one and two positions",
        RESNET,
        "pp=4,dp=2,micro=8,zero=1,widths=1+2+1",
        batch=32,
    ),
    Row(
        "pipeline, stages of one and two positions, GPipe",
        RESNET,
        "pp=4,tp=2,micro=4,zero=1,widths=2+1+1,schedule=gpipe",
        batch=32,
    ),
    Row(
        "pipeline, stages of one and two positions, state offloaded to host memory",
        RESNET,
        "pp=4,dp=2,micro=4,zero=2,widths=1+1+2,offload=optimizer",
        batch=32,
    ),
    Row(
        "pipeline, stages of one and two positions, one tick of microbatches",
        RESNET,
        "pp=4,dp=2,micro=2,zero=1,widths=1+2+1",
    ),
    *(
        Row(
            "optimizer state offloaded to host memory",
            source,
            "dp=8,zero=1,micro=1,offload=optimizer",
        )
        for source in (GPT, MIXTRAL, T5, RESNET)
    ),
    Row(
        "optimizer state offloaded to host memory, with all else",
        LLAMA,
        "pp=2,dp=2,tp=2,micro=4,zero=2,recompute=block,offload=optimizer",
    ),
    Row(
        "optimizer state offloaded to host memory, uneven stages",
        RESNET,
        "pp=2,dp=2,tp=2,micro=4,zero=2,virtual=2,offload=optimizer",
    ),
    Row(
        "microbatch overlap, two pairs, recompute, ZeRO stage 3",
        GPT,
        "dp=4,tp=2,zero=3,micro=4,recompute=block-keep,copies=2",
        batch=32,
    ),
    Row(
        "microbatch overlap, two axes of tensors, ZeRO stage 1, recompute",
        LLAMA,
        "dp=2,model=2,model2=2,zero=1,micro=2,recompute=block,copies=2",
    ),
    Row(
        "microbatch overlap, ZeRO stage 2, two pairs",
        LLAMA,
        "dp=4,tp=2,zero=2,micro=4,copies=2",
        batch=32,
    ),
    Row(
        "microbatch overlap, optimizer state offloaded to host memory",
        GPT,
        "dp=4,tp=2,zero=1,micro=2,copies=2,offload=optimizer",
    ),
    Row(
        "what enters blocks offloaded to host memory",
        GPT,
        "dp=4,tp=2,micro=2,zero=1,recompute=block-keep,offload=optimizer+activations",
    ),
    Row(
        "what enters blocks offloaded to host memory",
        LLAMA,
        "dp=8,micro=1,zero=3,recompute=block,offload=activations",
    ),
    Row(
        "what enters blocks offloaded to host memory",
        MIXTRAL,
        "dp=4,tp=2,micro=2,zero=1,recompute=block,offload=optimizer+activations",
    ),
    Row(
        "what enters blocks offloaded to host memory",
        T5,
        "dp=8,micro=1,zero=1,recompute=block,offload=activations",
    ),
    Row(
        "blocks' weights offloaded to host memory",
        GPT,
        "dp=4,tp=2,micro=1,zero=0,recompute=block,offload=optimizer+parameters",
    ),
    Row(
        "blocks' weights offloaded to host memory",
        LLAMA,
        "dp=8,micro=2,zero=3,recompute=block,offload=optimizer+parameters",
    ),
    Row(
        "blocks' weights offloaded to host memory, with all that may be",
        GPT,
        "dp=4,tp=2,micro=2,zero=2,recompute=block-keep,offload=optimizer+activations+parameters+embeddings",
    ),
    Row(
        "embedding tables offloaded to host memory",
        LLAMA,
        "dp=8,micro=2,zero=3,offload=optimizer+embeddings",
    ),
    Row(
        "embedding tables offloaded to host memory",
        MIXTRAL,
        "dp=4,tp=2,micro=1,zero=1,offload=optimizer+embeddings",
    ),
    Row(
        "hybrid: parameters cut by hand",
        LLAMA,
        "dp=2,tp=4",
        nodes=FEED_FORWARD,
        options={"mode": "hybrid"},
    ),
    Row(
        "communication fusion",
        GPT,
        "dp=8,zero=1,micro=1,bucket=64KiB",
        options={"hardware": "h100-sxm"},
    ),
    Row(
        "communication fusion",
        LLAMA,
        "dp=4,tp=2,micro=2,zero=2,bucket=1MiB",
        options={"hardware": "h100-sxm"},
    ),
    Row(
        "communication fusion",
        RESNET,
        "dp=8,zero=0,micro=1,bucket=8KiB",
        options={"hardware": "h100-sxm"},
    ),
    Row(
        "sharding propagation",
        LLAMA,
        "dp=2,tp=4",
        nodes={
            "*q_proj": {"split": {"b0": ["data"], "n": ["tensor"]}},
            "*up_proj": {"split": {"n": ["tensor"]}},
        },
        options={"mode": "propagate"},
    ),
    Row(
        "sharding propagation",
        T5,
        "dp=2,tp=4",
        nodes={
            "*SelfAttention.q*": {"split": {"b0": ["data"], "n": ["tensor"]}},
            "*wi*": {"split": {"n": ["tensor"]}},
        },
        options={"mode": "propagate"},
    ),
    Row(
        "double-recursive hybrid",
        T5,
        "dp=2,model=2,model2=2,micro=2,zero=1,recompute=block",
        options={"solver": "recursive"},
    ),
    Row(
        "double-recursive hybrid",
        GPT,
        "pp=2,model=2,model2=2,micro=2,zero=1,recompute=block",
        options={"solver": "recursive"},
    ),
)
_EACH = [
    Row(what, source, pins, less, batch)
    for what, pins, less, sources, batch in EVERYWHERE
    for source in sources
]
ALONE = (
    *(r for r in _EACH if r.source != UNET),
    *SPECIAL,
    *(r for r in _EACH if r.source == UNET),
    Row("pipeline, uneven stages, 1F1B", UNET, "pp=4,dp=2,micro=2,zero=1"),
    Row("pipeline, uneven stages, interleaved", UNET, "pp=2,dp=4,micro=2,zero=1,virtual=2"),
    Row("pipeline, stages of one and two positions", UNET, "pp=4,dp=2,micro=4,zero=1,widths=1+2+1"),
)
"""Every technique on every model it is for; the UNet's, which compile for minutes, last."""


def drawn(count: int, seed: int) -> Iterator[Row]:
    """Combinations of stages and their schedule, tensor (one axis or two), data and optimizer
    parallelism, microbatches (one by one or two at the same time), recomputation and host memory on
    8 devices, none of them twice for a model."""
    rng, seen = random.Random(seed), set[tuple[str, str]]()
    while len(seen) < count:
        source = MODELS[len(seen) % len(MODELS)]
        stages = rng.choice((1, 2, 4)) if source in BLOCKS else 1
        stages = min(stages, 2) if source == T5 else stages
        tensor = rng.choice([t for t in (1, 2, 4, 8) if stages * t <= DEVICES])
        data = DEVICES // stages // tensor
        axes = [
            ("pp", stages),
            ("dp", data),
            *(
                (("model", 2), ("model2", 2))
                if tensor == 4 and rng.random() < 0.5
                else (("tp", tensor),)
            ),
        ]
        micro = max(stages, rng.choice((2, 4))) if stages > 1 else rng.choice((1, 2))
        level = rng.choice((0, 1, 2) if stages > 1 else (0, 1, 2, 3))
        parts = [f"{a}={n}" for a, n in axes if n > 1]
        copies = ["copies=2"] if stages == 1 and micro == 2 and level % 2 else []
        parts += [
            f"micro={micro}",
            *copies,
            f"zero={level}",
            *(
                [f"recompute={rng.choice(('none', 'block', 'block-keep'))}"]
                if source in BLOCKS
                else []
            ),
        ]
        parts += (
            [f"schedule={rng.choice(('gpipe', '1f1b') if level < 2 else ('1f1b',))}"]
            if stages > 1
            else []
        )
        parts += ["offload=optimizer"] if level and rng.random() < 0.25 else []
        pins = ",".join(parts)
        if (source, pins) not in seen:
            seen.add((source, pins))
            kink = (
                source == T5 and micro > 1
            )  # at batch 32 an operand of a ReLU lies within rounding of zero in the third step
            yield Row(
                f"drawn {len(seen)}", source, pins, batch=64 if micro * data > 8 or kink else 32
            )


DEEPSEEK = "zoo:deepseek-tiny"
POOL = (
    (GPT, 4),
    (LLAMA, 4),
    (MIXTRAL, 4),
    (T5, 2),
    (RESNET, 0),
    ("zoo:t5-tiny,layers=4", 4),
    (DEEP, 8),
    ("zoo:llama-tiny,layers=8", 8),
    ("zoo:mixtral-tiny,layers=8", 8),
    (DEEPSEEK, 0),
    ("zoo:gpt-tiny,layers=5,seq=32", 5),
    (RESNET, 0),
    (UNET, 0),
)
"""(model, blocks that can be dealt out over stages, 0: it is cut into uneven ones) of `mixed`."""
ATTENDING = ("gpt", "llama", "t5")


def mixed(count: int, seed: int) -> Iterator[Row]:
    """Combinations of everything that a row of `ALONE` has alone, as far as pins do not contradict
    each other: of stages with their chunks, positions (left to the search, on a ring, by
    all-to-all), experts (left to it, or with tokens routed to them), tensors, copies, levels in
    groups, recomputation and all kinds of host memory. None of them twice.
    """
    rng, routed, seen = (
        random.Random(seed),
        random.Random(f"{seed} routed"),
        set[tuple[str, str, str]](),
    )
    while len(seen) < count:
        source, blocks = POOL[len(seen) % len(POOL)]
        name = source.removeprefix("zoo:").partition("-")[0]
        uneven = not blocks and name != "deepseek"
        stages = rng.choice((1, 2, 2, 4)) if uneven or blocks > 2 else rng.choice((1, 2))
        left = DEVICES // stages
        axes = [("pp", stages)]
        second = (
            "sequence" if name in ATTENDING else "expert" if name in ("mixtral", "deepseek") else ""
        )
        width = rng.choice([n for n in (1, 2, 2, 4) if n <= left]) if second else 1
        how = (
            rng.choice(("free", "ring", "heads")[: 3 if width == 2 else 2])
            if second == "sequence" and width > 1
            else "free"
        )
        how = routed.choice(("free", "routed")) if second == "expert" and width > 1 else how
        tensor = rng.choice([n for n in (1, 2, 2, 4) if n <= left // width])
        data = left // width // tensor
        axes += [
            ("dp", data),
            (second, width),
            *(
                (("model", 2), ("model2", 2))
                if tensor == 4 and rng.random() < 0.5
                else (("tp", tensor),)
            ),
        ]
        chunks = rng.choice(
            [
                v
                for v in (1, 1, 2, 4)
                if stages > 1
                and ((uneven and stages * v <= 8) or (blocks and blocks % (stages * v) == 0))
            ]
            or [1]
        )
        micro = stages * rng.choice((1, 2)) if stages > 1 else rng.choice((1, 2, 4))
        level = rng.choice((0, 1, 2) if stages > 1 else (0, 1, 2, 3))
        recompute = (
            rng.choice(("none", "block", "block-keep"))
            if blocks or (not uneven and stages == 1)
            else ""
        )
        copies = stages == 1 and micro > 1 and rng.random() < 0.4
        parts = [f"{a}={n}" for a, n in axes if n > 1] + [f"micro={micro}", f"zero={level}"]
        parts += (
            [f"zero_group={rng.choice((2, data))}"]
            if level and data > 2 and rng.random() < 0.4
            else []
        )
        parts += [f"recompute={recompute}"] if recompute else []
        parts += ["copies=2"] if copies else []
        parts += (
            [
                (
                    f"virtual={chunks}"
                    if chunks > 1
                    else f"schedule={rng.choice(('gpipe', '1f1b') if level < 2 else ('1f1b',))}"
                )
            ]
            if stages > 1
            else []
        )
        parts += (
            [f"tensor={rng.choice(('megatron', 'megatron-sp'))}"]
            if tensor > 1 and width == 1 and name in (*ATTENDING, "mixtral") and rng.random() < 0.4
            else []
        )
        away = [w for w in ("optimizer",) if rng.random() < 0.4]
        away += [
            w
            for w in ("activations",)
            if stages == 1 and recompute in ("block", "block-keep") and rng.random() < 0.4
        ]
        away += [
            w
            for w in ("parameters",)
            if stages == 1
            and away[:1] == ["optimizer"]
            and recompute in ("block", "block-keep")
            and not copies
            and rng.random() < 0.4
        ]
        parts += [f"offload={'+'.join(away)}"] if away else []
        nodes = {
            "free": {},
            "ring": RING,
            "routed": EXPERTS,
            "heads": {
                "*Attention": {
                    "split": {"g": ["sequence"], **({"b": ["data"]} if data > 1 else {})}
                }
            },
        }[how]
        pins = ",".join(parts)
        if (source, pins, how) not in seen:
            seen.add((source, pins, how))
            yield Row(
                f"mixed {len(seen)}",
                source,
                pins,
                batch=64 if micro * data > 8 or name == "t5" else 32,
                nodes=nodes,
            )
