"""The rows of `benchmarks.techniques`: every technique alone on six kinds of model, and combinations drawn at random."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

DEVICES = 8
GPT, LLAMA, MIXTRAL, T5 = "zoo:gpt-tiny,layers=4,seq=32", "zoo:llama-tiny,layers=4", "zoo:mixtral-tiny,layers=4", "zoo:t5-tiny"
RESNET, UNET = "zoo:resnet-tiny", "zoo:unet-tiny"
DEEP = "zoo:gpt-tiny,layers=8,seq=32"
MODELS = (GPT, LLAMA, MIXTRAL, T5, RESNET, UNET)
BLOCKS = (GPT, LLAMA, MIXTRAL, T5)
"""Models of blocks that all repeats share: they can be dealt out over stages and recomputed. Others are cut into stages of their own."""


@dataclass(frozen=True)
class Row:
    """A technique on a model. less: the technique whose memory, on the same model and batch, is to be above this one's. nodes: pins of operators by glob.
    options: of `planner.plan` beside pins."""

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
        return self.what, self.source, self.pins, self.batch, repr(dict(self.nodes)), repr(dict(self.options))


EVERYWHERE = (
    ("data parallel", "dp=8,zero=0,micro=1", "", MODELS),
    ("operator-level, simple", "dp=2,tp=4,zero=0,micro=1", "data parallel", BLOCKS),
    ("operator-level, simple", "dp=2,tp=4,zero=0,micro=1", "", (RESNET, UNET)),
    ("operator-level, higher order", "dp=2,model=2,model2=2,zero=0,micro=1", "", MODELS),
    ("optimizer parallel, level 1", "dp=8,zero=1,micro=1", "data parallel", MODELS),
    ("optimizer parallel, level 2", "dp=8,zero=2,micro=2", "", BLOCKS),
    ("optimizer parallel, level 3", "dp=8,zero=3,micro=1", "data parallel", MODELS),
    ("gradient accumulation", "dp=4,tp=2,micro=2", "", (*BLOCKS, UNET)),
    ("recompute a block", "dp=8,zero=0,micro=1,recompute=block", "data parallel", BLOCKS),
    ("recompute, collectives kept", "dp=2,tp=4,zero=0,micro=1,recompute=block-keep", "operator-level, simple", BLOCKS),
    ("pipeline, 1F1B", "pp=2,dp=4,micro=4,zero=0,schedule=1f1b", "", BLOCKS),
    ("stages, tensor, data, levels and recompute in one", "pp=2,dp=2,tp=2,micro=4,zero=2,recompute=block", "", BLOCKS),
)
SPECIAL = (
    Row("operator-level, one axis of all devices", GPT, "tp=8,micro=1", less="data parallel"),
    Row("sequence parallel", GPT, "sequence=2,dp=4,micro=1"),
    Row("attention on a ring", GPT, "sequence=8,micro=1", nodes={"*Attention": {"split": {"ring": ["sequence"]}}}),
    Row("experts on devices, tokens routed", "zoo:mixtral-tiny", "expert=2,dp=4,micro=1", nodes={"*experts*": {"split": {"expert-b": ["expert"]}}}),
    Row("rows of images", UNET, "sequence=2,dp=4,micro=1", batch=4),
    Row("optimizer parallel, level 1 in groups", GPT, "dp=8,zero=1,zero_group=4,micro=1", less="data parallel"),
    Row("optimizer parallel, level 3 in groups", GPT, "dp=8,zero=3,zero_group=4,micro=1", less="data parallel"),
    Row("pipeline, GPipe", GPT, "pp=4,dp=2,micro=8,schedule=gpipe,zero=0"),
    Row("pipeline, 1F1B of four stages", GPT, "pp=4,dp=2,micro=8,zero=0,schedule=1f1b", less="pipeline, GPipe"),
    Row("pipeline, interleaved", DEEP, "pp=4,dp=2,micro=8,zero=0,virtual=2"),
    Row("pipeline, interleaved, four chunks", DEEP, "pp=2,tp=2,dp=2,micro=4,zero=2,recompute=block,virtual=4"),
    Row("pipeline, uneven stages", "zoo:gpt-tiny,layers=5", "pp=4,dp=2,micro=4"),
    Row("pipeline, encoder and decoder, interleaved", "zoo:t5-tiny,layers=4", "pp=2,tp=2,dp=2,micro=4,virtual=2"),
    Row("pipeline, unequal stages, GPipe", RESNET, "pp=4,dp=2,micro=16,zero=0,schedule=gpipe", batch=64),
    Row("pipeline, unequal stages, 1F1B", RESNET, "pp=4,dp=2,micro=16,zero=0,schedule=1f1b", less="pipeline, unequal stages, GPipe", batch=64),
    Row("pipeline, unequal stages, tensor, data and levels in one", RESNET, "pp=2,dp=2,tp=2,micro=4,zero=2"),
    Row("optimizer state in the host's memory", GPT, "dp=8,zero=1,micro=1,offload=optimizer"),
    Row("optimizer state in the host's memory, with all else", LLAMA, "pp=2,dp=2,tp=2,micro=4,zero=2,recompute=block,offload=optimizer"),
    Row("optimizer state in the host's memory", RESNET, "dp=8,zero=1,micro=1,offload=optimizer"),
    Row("what enters blocks in the host's memory", GPT, "dp=4,tp=2,micro=2,zero=1,recompute=block-keep,offload=optimizer+activations"),
    Row("what enters blocks in the host's memory", LLAMA, "dp=8,micro=1,zero=3,recompute=block,offload=activations"),
    Row("sharding propagation", LLAMA, "dp=2,tp=4", nodes={"*q_proj": {"split": {"b0": ["data"], "n": ["model"]}}, "*up_proj": {"split": {"n": ["model"]}}},
        options={"mode": "propagate"}),
    Row("double-recursive hybrid", T5, "dp=2,model=2,model2=2,micro=2,zero=1,recompute=block", options={"solver": "recursive"}),
)  # fmt: skip
_EACH = [Row(what, source, pins, less) for what, pins, less, sources in EVERYWHERE for source in sources]
ALONE = (*(r for r in _EACH if r.source != UNET), *SPECIAL, *(r for r in _EACH if r.source == UNET),
         Row("pipeline, unequal stages, 1F1B", UNET, "pp=4,dp=2,micro=2,zero=1"))  # fmt: skip
"""Every technique on every model it is for; the UNet's, which compile for minutes, last."""


def drawn(count: int, seed: int) -> Iterator[Row]:
    """Combinations of stages, tensor (one axis or two), data and optimizer parallelism, microbatches and recomputation on 8 devices."""
    rng = random.Random(seed)
    for k in range(count):
        source = MODELS[k % len(MODELS)]
        stages = rng.choice((1, 2, 4)) if source in BLOCKS else 1
        stages = min(stages, 2) if source == T5 else stages
        tensor = rng.choice([t for t in (1, 2, 4, 8) if stages * t <= DEVICES])
        data = DEVICES // stages // tensor
        axes = [("pp", stages), ("dp", data), *((("model", 2), ("model2", 2)) if tensor == 4 and rng.random() < 0.5 else (("tp", tensor),))]
        micro = max(stages, rng.choice((2, 4))) if stages > 1 else 1 if source == RESNET else rng.choice((1, 2))
        level = rng.choice((0, 1, 2) if stages > 1 else (0, 1, 2, 3))
        parts = [f"{a}={n}" for a, n in axes if n > 1]
        parts += [f"micro={micro}", f"zero={level}", *([f"recompute={rng.choice(('none', 'block', 'block-keep'))}"] if source in BLOCKS else [])]
        yield Row(f"drawn {k + 1}", source, ",".join(parts), batch=32)
