"""Megatron-LM: its command line, in launch scripts and lists of arguments, the same keys with
underscores in `--yaml-cfg` files and NeMo's, and Megatron-Bridge's recipes, whose attributes they
are.

    tensor_model_parallel_size, context_parallel_size, pipeline_model_parallel_size    tensor,
        sequence, stage
    expert_model_parallel_size                                                         expert: taken
        from the data-parallel ranks
    micro_batch_size, global_batch_size                                                rows, batch
    use_distributed_optimizer                                                          ZeRO stage 1
    use_megatron_fsdp, data_parallel_sharding_strategy                                 ZeRO stages 2
        (optim_grads) and 3 (optim_grads_params); use_torch_fsdp2: 3
    recompute_granularity                                                              full: every
        block; selective: attention's core, as the planner's kernels do, or with recompute_modules
        those (`MODULES`)

    num_virtual_stages_per_pipeline_rank, virtual_pipeline_model_parallel_size         chunks of a
        stage; num_layers_per_virtual_pipeline_stage: so many layers each
    pipeline_model_parallel_layout                                                     layers of
        each chunk, where they are not as many
    overlap_moe_expert_parallel_comm                                                   experts' rows
        are sent beside kernels of another microbatch
    bf16, fp16, fp8_format with fp8_recipe, grad_reduce_in_bf16; of Megatron-Bridge     precision
        mixed_precision, grad_reduce_in_fp32

Source: megatron/training/arguments.py and yaml_arguments.py of NVIDIA/Megatron-LM,
Megatron Core 0.20.0 (d98e8a64dd, August 2026); megatron/bridge/training/config.py and perf_recipes
of NVIDIA-NeMo/Megatron-Bridge (067f987df, August 2026).
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import groupby
from math import gcd, prod
from shlex import quote

from planner.errors import PlanError
from planner.execution.pipeline import laid_out_blocks
from planner.execution.techniques import BESIDE, BLOCK_KEEP, INTERLEAVED, WAITING, ZB_H1
from planner.interop import adapters, optimizers, precisions
from planner.interop.keys import Keys
from planner.interop.model_sizes import (
    EXPERTS,
    GROUPS,
    HEADS,
    HIDDEN,
    INNER,
    LAYERS,
    VOCABULARY,
    Claim,
    claims_of,
)
from planner.interop.settings import Facts, Rounds, Settings, sharing
from planner.interop.unset import COMPUTED
from planner.pins.launcher_space import ends
from planner.pricing.frameworks.selective import DENSE, LATENTS, NORMS, ROUTED, SHARED

NAME, SUFFIX = "megatron", ".yaml"
MARKS = r"\w+_model_parallel_size|context_parallel_size|micro_batch_size"
OWN = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
"""Keys that no other launcher's files have."""
FIRST = ("mixed_precision", "trainer.plugins", "train", "model")
"""Sections whose value of a key counts: Megatron-Bridge sets sums of gradients from its
mixed_precision, NeMo's recipes from a plugin, and files of NeMo say sizes of data and of encoders
of images beside the model's."""
STARTED = ("trainer.devices", "trainer.num_nodes")
"""Keys of NeMo whose product is the number of processes."""
SIZES = {
    LAYERS: ("num_layers",),
    HIDDEN: ("hidden_size",),
    HEADS: ("num_attention_heads",),
    INNER: ("ffn_hidden_size",),
    EXPERTS: ("num_experts", "num_moe_experts"),
}
LAYOUT = "pipeline_model_parallel_layout"
OVERLAP = "overlap_moe_expert_parallel_comm"
LEFT_OUT = {
    "optimizer_cpu_offload": "the state is priced on the devices",
    "use_precision_aware_optimizer": "the state is priced in float32",
    "cpu_offloading": "activations are priced on the devices",
    "fine_grained_activation_offloading": "activations are priced on the devices",
    "fp8_param_gather": "weights are priced as kept and sent in 16 bits",
    "fp8_param": "weights are priced as kept and sent in 16 bits",
    "moe_expert_capacity_factor": "no token of an expert is dropped",
    "outer_dp_sharding_strategy": "copies of shards are whole",
    "hybrid_context_parallel": "rows are priced as long as each other",
    "freeze_lm": "all parameters are priced as trained (--freeze GLOB)",
    "freeze_vit": "all parameters are priced as trained (--freeze GLOB)",
    "decoder_first_pipeline_num_layers": "stages are priced alike",
    "decoder_last_pipeline_num_layers": "stages are priced alike",
    LAYOUT: "layers are priced as evenly as chunks take them",
    "account_for_embedding_in_pipeline_split": "stages are priced alike",
    "account_for_loss_in_pipeline_split": "stages are priced alike",
    "mtp_num_layers": "the layers of multi-token prediction are those of the model, or not priced",
}
"""Keys that change the program and have no price here, and what is priced instead."""
ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
CHUNKS = ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank")
CHUNK_LAYERS = "num_layers_per_virtual_pipeline_stage"
STAGE_KEYS = (*CHUNKS, CHUNK_LAYERS, *ENDS, LAYOUT)
"""How layers lie on pipeline stages."""
RECOMPUTE = ("recompute", "activations_checkpoint")
"""What keys of recompute begin with: Megatron's, and NeMo's YAML's."""
DISTRIBUTED = ("distributed_fused_adam", "mcore_distributed_optim")
"""NeMo's optimizers whose state is cut over the replicas."""
PADDED = 128
"""make_vocab_size_divisible_by where a file does not say it."""
SHARDED = "data_parallel_sharding_strategy"
SHARDING = {2: "optim_grads", 3: "optim_grads_params"}
MODULES = {
    NORMS: "layernorm",
    LATENTS: "mla_up_proj",
    ROUTED: "moe_act",
    DENSE: "mlp",
    SHARED: "shared_experts",
}
"""Modules (planner.pricing.frameworks.selective) -> recompute_modules."""
CORE, WHOLE = "core_attn", "moe"
"""The module that fused attention recomputes in any case, and a mixture's experts whole."""


def round_off(rounds: Rounds, facts: Facts) -> list[str]:
    """Rounds settings to what Megatron can express; returns what it cannot and what has no
    price."""
    rounds.usual("Megatron", selective=bool(facts.modules), beside=True)
    if rounds.now.schedule in ("gpipe", ZB_H1):
        rounds.to("its schedule is 1F1B", schedule="1f1b")
    if rounds.now.exchanges == BESIDE and (why := _refused(rounds.now)):
        rounds.to(f"kernels wait for experts' rows where {why}", exchanges=WAITING)
    stages = rounds.now.stage
    if facts.layers and stages > 1 and not facts.chunks(stages, rounds.now.virtual_stages):
        return [f"{facts.layers} blocks on {stages} stages: some have none"]
    return []


def _layout(s: Settings, facts: Facts) -> str:
    """Layers of each chunk; "" where they are as many, or the ends alone have fewer."""
    chunks = facts.chunks(s.stage, s.virtual_stages) if s.stage > 1 and facts.layers else ()
    if len(set(chunks)) < 2 or (s.virtual_stages == 1 and _ends(s, facts)):
        return ""
    texts = ["t" * n for n in chunks]
    texts[0], last = f"E{texts[0]}", f"{texts.pop()}L"
    runs = [(text, len(list(same))) for text, same in groupby(texts)]
    return "".join(f"({text}|)*{n}" if n > 1 else f"{text}|" for text, n in runs) + last


def _ends(s: Settings, facts: Facts) -> tuple[int, int] | None:
    """Layers of the first and the last stage where those alone have fewer."""
    fewer = ends(facts.layers, s.stage) if facts.layers % s.stage and not facts.beside else None
    return (fewer[0] * facts.each, fewer[1] * facts.each) if fewer else None


def _keys_of(s: Settings, facts: Facts) -> dict[str, dict[str, object]]:
    """Section -> key -> value, of what the plan decides. Sections are those of Megatron-Bridge."""
    layout, uneven = _layout(s, facts), _ends(s, facts)
    chunks = s.virtual_stages if s.virtual_stages > 1 and not layout else None
    model: dict[str, object] = {
        "tensor_model_parallel_size": s.tensor,
        "context_parallel_size": s.sequence,
        "pipeline_model_parallel_size": s.stage,
        "virtual_pipeline_model_parallel_size": chunks,
        "sequence_parallel": s.positions,
        "expert_model_parallel_size": s.expert,
        "recompute_granularity": {"block": "full", BLOCK_KEEP: "selective"}.get(s.recompute),
    }
    model |= precisions.words(NAME, s.precision)
    if s.expert > 1:  # said either way: a file that turns it on may not suit what else is written
        model |= {OVERLAP: s.exchanges == BESIDE}
        model |= {"expert_tensor_parallel_size": s.tensor} if s.tensor > 1 else {}
    if layout:
        model |= {LAYOUT: layout}
    elif uneven:
        model |= dict(zip(ENDS, uneven, strict=True))
    if s.recompute == "block":
        model |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    if s.recompute == BLOCK_KEEP:
        model |= {"recompute_modules": [MODULES[name] for name in facts.modules]}
    if s.length:
        model |= {"seq_length": s.length}
    ddp: dict[str, object] = {"use_distributed_optimizer": s.zero_stage > 0}
    if s.zero_stage in SHARDING:
        ddp |= {
            "use_megatron_fsdp": True,
            "data_parallel_sharding_strategy": SHARDING[s.zero_stage],
        }
    if s.copies > 1:
        ddp |= {"num_distributed_optimizer_instances": s.copies}
    train: dict[str, object] = {"micro_batch_size": s.rows, "global_batch_size": s.batch}
    return {"model": model, "train": train, "ddp": ddp}


def _title(s: Settings, facts: Facts) -> str:
    return (
        f"{facts.model} on {s.devices} devices: data_parallel_size {s.replicas},"
        f" {s.microbatches} microbatches."
    )


_ARGUMENT_ALONE = "Megatron-LM follows it as an argument alone (-o FILE.sh)."
"""--yaml-cfg sums gradients of bf16 in float32 whatever a file says (yaml_arguments.py)."""


_OVERLAP_NEEDS = "    # Where cfg.comm_overlap is None: CommOverlapConfig(tp_comm_overlap=False)."
_PRECISION_COUNTS = "    # Its mixed_precision has grad_reduce_in_fp32 too, and the last word."


def write(s: Settings, facts: Facts) -> str:
    """The keys that the plan decides, to be merged into a configuration."""
    model, train, ddp = _keys_of(s, facts).values()
    language = {k: v for k, v in model.items() if k.startswith("recompute")}
    length = {k: v for k, v in model.items() if k == "seq_length"}
    parallel = {k: v for k, v in model.items() if k not in language and k not in length}

    def rows(keys: dict[str, object], indent: str = "") -> list[str]:
        return [f"{indent}{k}: {'null' if v is None else v}" for k, v in keys.items()]

    lines = [
        f"# {_title(s, facts)} Merge into a file for --yaml-cfg.",
        *[f"# {precisions.SUMS}: {_ARGUMENT_ALONE}"] * bool(parallel.get(precisions.SUMS)),
        "language_model:",
        *rows(language, "  "),
        "model_parallel:",
        *rows(parallel, "  "),
        *rows(train | length | ddp),
    ]
    return "\n".join(lines) + "\n"


def _arguments(s: Settings, facts: Facts) -> list[str]:
    keys = {k: v for section in _keys_of(s, facts).values() for k, v in section.items()}
    chunks = keys.pop("virtual_pipeline_model_parallel_size")
    keys |= {"num_virtual_stages_per_pipeline_rank": chunks}
    return [
        " ".join([f"--{k.replace('_', '-')}", *_words(v)])
        for k, v in keys.items()
        if v not in (None, False)
    ]


def _words(value: object) -> list[str]:
    """A value as words behind an argument."""
    if value is True:
        return []
    return [quote(str(v)) for v in (value if isinstance(value, list) else [value])]


def write_arguments(s: Settings, facts: Facts) -> str:
    """The same as arguments of Megatron-LM's programs, one a line."""
    return "\n".join([f"# {_title(s, facts)}", *_arguments(s, facts)]) + "\n"


def write_script(s: Settings, facts: Facts) -> str:
    """The same as an array of a launch script."""
    lines = [f"    {argument}" for argument in _arguments(s, facts)]
    return "\n".join(
        [
            f'# {_title(s, facts)} For a launch script: "${{PLANNED_ARGS[@]}}".',
            "PLANNED_ARGS=(",
            *lines,
            ")",
            "",
        ]
    )


def write_recipe(s: Settings, facts: Facts) -> str:
    """The same as a function that sets them in a recipe of Megatron-Bridge, where some stand in two
    sections."""
    keys = _keys_of(s, facts)
    name = "use_distributed_optimizer"
    if (narrow := keys["model"].pop(precisions.SUMS, None)) is not None:
        keys["ddp"]["grad_reduce_in_fp32"] = not narrow
    keys |= {"optimizer": {name: keys["ddp"][name]}}
    keys |= {"dataset": {"seq_length": s.length}} if s.length else {}
    if keys["model"].pop(OVERLAP, False):
        keys |= {"comm_overlap": {OVERLAP: True}}
    lines = [
        f"    cfg.{section}.{key} = {value!r}"
        for section, pairs in keys.items()
        for key, value in pairs.items()
    ]
    return "\n".join(
        [
            f"# {_title(s, facts)} For a recipe of Megatron-Bridge: planned(cfg).",
            "def planned(cfg):",
            *[_PRECISION_COUNTS] * bool(narrow),
            *[_OVERLAP_NEEDS] * ("comm_overlap" in keys),
            *lines,
            "    return cfg",
            "",
        ]
    )


FORMS = {
    ".sh": write_script,
    ".args": write_arguments,
    ".txt": write_arguments,
    ".py": write_recipe,
}
"""How a file ends -> what writes it; any other is YAML."""


def claims(keys: Keys) -> tuple[Claim, ...]:
    """The sizes of the model that a file says. Raises PlanError P191."""
    claims = claims_of(keys, SIZES)
    if keys.flag(False, "group_query_attention"):
        claims += claims_of(keys, {GROUPS: ("num_query_groups",)})
    claims += claims_of(keys, {INNER: ("moe_ffn_hidden_size",)})
    claims += claims_of(keys, {VOCABULARY: ("padded_vocab_size",)})
    if not _counts_words(keys):
        return claims
    vocabulary = claims_of(keys, {VOCABULARY: ("vocab_size",)})
    tensor = keys.whole(1, "tensor_model_parallel_size")
    multiple = keys.whole(PADDED, "make_vocab_size_divisible_by") * tensor
    return claims + tuple(
        Claim(c.key, c.size, c.value, -(-c.value // multiple) * multiple) for c in vocabulary
    )


def _counts_words(keys: Keys) -> bool:
    """Whether vocab_size is the model's: in Megatron-Bridge a tokenizer's is only where a recipe
    says so."""
    places = [where for where, value in keys.entries("vocab_size") if value is not None]
    outside_tokenizer = [where for where in places if where.rpartition(".")[0] != "tokenizer"]
    from_tokenizer = keys.flag(False, "use_tokenizer_vocab_size")
    keys.some("vocab_size") if outside_tokenizer or from_tokenizer else keys.at(
        "tokenizer.vocab_size"
    )
    return bool(outside_tokenizer) or from_tokenizer


def read(keys: Keys, devices: int, domain: int) -> tuple[Settings, list[str]]:
    """Settings of a configuration and what it says beyond them. Raises PlanError P191 where keys
    contradict each other."""
    notes: list[str] = []
    tp, cp, pp = (
        keys.whole(1, k)
        for k in (
            "tensor_model_parallel_size",
            "context_parallel_size",
            "pipeline_model_parallel_size",
        )
    )
    ep = keys.whole(1, "expert_model_parallel_size", "moe_expert_parallel_size")
    cp *= _ulysses(keys, notes)
    pp = 1 if keys.flag(False, "no_pipeline_parallel") else pp
    replicas, rest = divmod(devices, tp * cp * pp)
    if rest or not replicas:
        raise PlanError(
            "P191",
            f"tensor {tp} x context {cp} x pipeline {pp} does not divide {devices} devices",
            help=[f"--devices as many as the configuration runs on: a multiple of {tp * cp * pp}"],
        )
    ep = _expert_ranks(keys, ep, replicas, (tp, cp), notes)
    batch, microbatches = _batch(keys, replicas)
    virtual = _virtual_stages(keys, pp, notes)
    notes += [
        f"{key} is left out: the full batch is priced"
        for key in ("rampup_batch_size", "step_batch_size_schedule")
        if keys.get(key) is not None
    ]
    notes += _left_out(keys, pp)
    notes += adapters.notes_of(keys)
    started = [n for n in map(keys.at, STARTED) if type(n) is int]
    if len(started) == len(STARTED) and prod(started) != devices:
        notes.append(f"it starts {prod(started)} processes, and is priced on {devices} devices")
    notes += optimizers.notes_of(keys, "optimizer", "optimizer.optimizer")
    zero = _zero_stage(keys, pp, notes)
    copies = keys.whole(1, "num_distributed_optimizer_instances") if zero else 1
    settings = Settings(
        batch=batch,
        stage=pp,
        data=replicas // ep,
        expert=ep,
        sequence=cp,
        tensor=tp,
        microbatches=microbatches,
        zero_stage=zero,
        zero_group=sharing(copies, replicas // ep, devices // pp, domain, notes),
        recompute=_recompute(keys, _layers(keys) // (pp * virtual), notes),
        schedule=INTERLEAVED if virtual > 1 else "1f1b" if pp > 1 else "",
        positions=keys.flag(False, "sequence_parallel") and tp > 1,
        length=_length(keys),
        virtual_stages=virtual,
        precision=precisions.read(NAME, keys, notes),
    )
    return replace(settings, exchanges=_exchanges(settings, keys, notes)), notes


def _ulysses(keys: Keys, notes: list[str]) -> int:
    """Sequence ranks of Megatron-DeepSpeed."""
    ranks = keys.whole(1, "ds_sequence_parallel_size")
    if ranks > 1:
        notes.append("sequence ranks of DeepSpeed (Ulysses) are priced as context ranks")
    return ranks


def _expert_ranks(
    keys: Keys, ranks: int, replicas: int, dense: tuple[int, int], notes: list[str]
) -> int:
    """Data-parallel ranks that experts are parted among. ranks: those of a file, of which tensor
    and context ranks may be some; dense: tensor and context ranks. Raises PlanError P191 where
    experts would have more memory, or less, than they have there."""
    tensor, context = dense
    expert_tensor = keys.whole(tensor, "expert_tensor_parallel_size")
    if replicas % ranks == 0:
        if expert_tensor != tensor and (ranks > 1 or "num_experts" in keys):
            less = f": of experts a device holds {expert_tensor}/{tensor} of what it does there"
            notes.append(
                f"expert_tensor_parallel_size {expert_tensor} is priced as {tensor}, as of the rest"
                + (less if expert_tensor < tensor else "")
            )
        return ranks
    priced = gcd(ranks, replicas)
    if (replicas * tensor * context) % (ranks * expert_tensor):
        raise PlanError(
            "P191",
            f"expert_model_parallel_size {ranks} does not divide the {replicas} data-parallel"
            f" ranks, nor those with {tensor} tensor and {context} context ranks",
            help=["--devices as many as the configuration runs on"],
        )
    if priced * tensor != ranks * expert_tensor:
        raise PlanError(
            "P191",
            f"expert_model_parallel_size {ranks} x expert_tensor_parallel_size {expert_tensor} does"
            " not"
            f" divide the {replicas} data-parallel ranks x {tensor} tensor ranks",
            help=["experts over context ranks have no axis here"],
        )
    notes.append(
        f"experts over {ranks} ranks, tensor ranks among them, are priced as over {priced}"
        f" data-parallel ranks, cut by {tensor} tensor ranks"
    )
    return priced


def _left_out(keys: Keys, stages: int) -> list[str]:
    """Notes on keys that change the program and have no price. Where only the ends hold fewer
    layers than other stages, all take the time of the fullest, as they are priced, and so are
    layers laid out as evenly as chunks take them."""
    layers = _layers(keys)
    priced = layers and ends(layers, stages) == tuple(keys.whole(0, end) for end in ENDS)
    known: tuple[str, ...] = ENDS if priced else ()
    if layout := _known_layout(keys):
        counts = _counts(layout)
        known = (LAYOUT,) if counts == laid_out_blocks(sum(counts), len(counts), 0, 0) else ()
    return [
        f"{key} is left out: {why}"
        for key, why in LEFT_OUT.items()
        if keys.some(key) and key not in known
    ]


def _length(keys: Keys) -> int:
    """Tokens of a row: of a model of images and text those of the text, of whose pictures
    seq_length speaks."""
    pictured = "decoder_seq_length" in keys and "encoder_num_layers" not in keys
    length = keys.whole(0, "seq_length", "encoder_seq_length")
    return keys.whole(0, "decoder_seq_length") if pictured else length


def _layers(keys: Keys) -> int:
    """Layers that the file says, or the model has; 0 where nobody knows."""
    unknown = keys.some("num_layers") == COMPUTED
    return keys.layers() if unknown else keys.whole(0, "num_layers") or keys.layers()


def _known_layout(keys: Keys) -> object:
    """A layout that the file says itself; None where there is none, or running it would say it."""
    return None if keys.some(LAYOUT) == COMPUTED else keys.get(LAYOUT)


def _counts(layout: object) -> tuple[int, ...]:
    """Layers of each chunk of a layout, a text or the lists that recipes have."""
    if isinstance(layout, list | tuple):
        return tuple(
            sum(part == "decoder" for part in chunk) if isinstance(chunk, list | tuple) else 0
            for chunk in layout
        )
    return tuple(chunk.count("t") for chunk in _unrolled(str(layout)).split("|"))


def _unrolled(layout: str) -> str:
    """A layout without repetitions: chunks parted by "|"."""
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        layout = re.sub(repeated, lambda match: match[1] * int(match[2]), layout)
    return layout


def _virtual_stages(keys: Keys, stages: int, notes: list[str]) -> int:
    """Chunks of a pipeline stage. Raises PlanError P191 where layers do not divide into them."""
    virtual = keys.whole(1, *CHUNKS)
    if layout := _known_layout(keys):
        return _chunks_of(layout, stages)
    chunk_layers = keys.whole(0, CHUNK_LAYERS)
    if chunk_layers and CHUNKS[1] in keys and keys.get(CHUNKS[1]) is not None:
        raise PlanError(
            "P191",
            f"{CHUNK_LAYERS} and {CHUNKS[1]} are both set, which Megatron refuses",
            help=["leave one of them"],
        )
    if stages == 1 or not chunk_layers or virtual > 1:
        return virtual if stages > 1 else 1
    layers = _layers(keys)
    if not layers:
        notes.append("interleaved stages are priced as plain 1F1B: their bubble is smaller")
        return 1
    virtual, rest = divmod(layers, stages * chunk_layers)
    if rest or not virtual:
        raise PlanError(
            "P191",
            f"{layers} layers do not divide into {stages} stages of chunks of {chunk_layers}"
            f" ({CHUNK_LAYERS})",
        )
    return virtual


def _chunks_of(layout: object, stages: int) -> int:
    """Chunks of a pipeline stage by a layout. Raises PlanError P191 where it has no whole
    number."""
    chunks = len(_counts(layout))
    virtual, rest = divmod(chunks, stages)
    if rest:
        raise PlanError(
            "P191",
            f"the {chunks} chunks of {LAYOUT} do not divide into {stages} stages",
            help=[f"{LAYOUT}=null behind the file lays layers out evenly"],
        )
    return virtual


def _batch(keys: Keys, replicas: int) -> tuple[int, int]:
    """(rows of a step, microbatches). Raises PlanError P191 where they do not divide."""
    rows = keys.whole(0, "micro_batch_size")
    if not rows:
        raise PlanError(
            "P191",
            "micro_batch_size is missing",
            help=["micro_batch_size=N behind the file; Megatron asks for it as well"],
        )
    batch = keys.whole(rows * replicas, "global_batch_size")
    microbatches, rest = divmod(batch, rows * replicas)
    if rest or not microbatches:
        raise PlanError(
            "P191",
            f"global_batch_size {batch} is no multiple of micro_batch_size {rows} x {replicas}"
            " data-parallel ranks",
        )
    return batch, microbatches


def _zero_stage(keys: Keys, stages: int, notes: list[str]) -> int:
    """The ZeRO stage; 3 with pipeline stages, which the planner does not run, is priced as 2."""
    fsdp, sharding = (
        keys.flag(False, "use_megatron_fsdp", "use_custom_fsdp"),
        keys.word("no_shard", SHARDED),
    )
    known = {"no_shard": 0, "optim": 1, **{word: zero for zero, word in SHARDING.items()}}
    if sharding not in known:
        raise PlanError(
            "P191",
            f"data_parallel_sharding_strategy = {sharding!r}",
            help=[f"one of {', '.join(known)}"],
        )
    distributed = keys.flag_anywhere("use_distributed_optimizer")  # as Megatron-Bridge syncs both
    distributed |= keys.at("optim.name") in DISTRIBUTED  # NeMo
    distributed |= keys.at("optimizer") == optimizers.DIST_MUON
    distributed |= keys.flag(False, "use_layer_wise_distributed_optimizer")
    zero = max(int(distributed), known[sharding] if fsdp else 0)
    zero = max(zero, keys.whole(0, "zero_stage", least=0))  # Megatron-DeepSpeed
    if keys.flag(False, "fsdp"):  # NeMo
        zero = 2 if keys.word("full", "fsdp_sharding_strategy") in ("grad", "shard_grad_op") else 3
    if keys.flag(False, "use_torch_fsdp2"):
        zero = 2 if keys.flag(False, "torch_fsdp2_no_reshard_after_forward") else 3
    elsewhere = [
        where for where, _ in keys.entries(SHARDED) if not f".{where}".endswith(f".ddp.{SHARDED}")
    ]
    if known[sharding] and not fsdp and elsewhere:  # a table of DDP has it whatever shards
        notes.append("data_parallel_sharding_strategy says nothing without use_megatron_fsdp")
    if zero == 3 and stages > 1:
        notes.append("ZeRO-3 with stages is priced as ZeRO-2")
        return 2
    return zero


def _exchanges(s: Settings, keys: Keys, notes: list[str]) -> str:
    """Whether experts' rows are sent beside other kernels, where Megatron can."""
    if not keys.flag(False, OVERLAP):
        return WAITING
    if why := _refused(s):
        notes.append(f"{OVERLAP} is left out, as Megatron refuses it: {why}")
    return WAITING if why else BESIDE


def _refused(s: Settings) -> str:
    """Why Megatron sends no experts' rows beside other kernels, "" where it can."""
    refused = {
        "every rank has all experts": s.expert == 1,
        "whole blocks are recomputed": s.recompute == "block",
        "stages do not interleave": s.stage > 1 and s.virtual_stages == 1,
    }
    return next((why for why, true in refused.items() if true), "")


def _some_blocks(some: int, layers: int, notes: list[str]) -> str:
    """Recompute of the first `some` of a stage's layers, as every block or none, whichever is
    nearer."""
    if not layers or some >= layers:
        if some < layers or not layers:
            notes.append("recompute_method block is priced as recompute of every block")
        return "block"
    nearer = "block" if 2 * some >= layers else "none"
    notes.append(
        f"recompute of {some} of a stage's {layers} layers (recompute_method block) is priced as"
        f" recompute of {'every block' if nearer == 'block' else 'none'}"
    )
    return nearer


def _recompute(keys: Keys, layers: int, notes: list[str]) -> str:
    """layers: of a stage, 0 where they are not known."""
    word = keys.word("", *(f"{name}_granularity" for name in RECOMPUTE))
    experts = keys.flag(False, "moe_layer_recompute")
    if not word and (keys.flag(False, "recompute_activations") or experts):
        word = "selective"
    if not word and keys.flag(False, "checkpoint_activations"):  # Megatron-DeepSpeed
        word = "full"
    if word not in ("", "full", "selective"):
        raise PlanError(
            "P191", f"recompute_granularity = {word!r}", help=["full, selective or null"]
        )
    method = keys.word("uniform", *(f"{name}_method" for name in RECOMPUTE))
    some = keys.whole(0, *(f"{name}_num_layers" for name in RECOMPUTE), least=0)
    if word == "full" and method == "block":
        return _some_blocks(some, layers, notes)
    modules = _listed(keys.get("recompute_modules")) | ({WHOLE} if experts else set())
    shown = {
        NORMS: True,
        LATENTS: keys.flag(False, "multi_latent_attention"),
        ROUTED: "num_experts" in keys or "num_moe_experts" in keys,
        SHARED: "moe_shared_expert_intermediate_size" in keys,
    }
    if word == "selective":
        return _selective(modules, shown, notes)
    return "block" if word == "full" else "none"


def _listed(value: object) -> set[str]:
    """The modules of recompute_modules, attention's core where none are listed; a list may be
    written as a text."""
    listed = value if isinstance(value, list | tuple) else re.findall(r"\w+", str(value or CORE))
    return {str(name) for name in listed if name is not None} - {"True"} or {CORE}


def _selective(modules: set[str], shown: dict[str, bool], notes: list[str]) -> str:
    """How recompute of some modules is priced. shown: those that a file says the model has."""
    known = {CORE, WHOLE, *MODULES.values()}
    notes += [f"recompute_modules {m} has no price" for m in sorted(modules - known)]
    parts = {part for part, name in MODULES.items() if name in modules}
    mixture = shown[ROUTED] or bool(parts & {ROUTED, SHARED})
    if WHOLE in modules or (DENSE in parts and not mixture):
        large = WHOLE if WHOLE in modules else MODULES[DENSE]
        notes.append(f"recompute_modules {large} is priced as recompute of whole blocks")
        return "block"
    if not parts:
        notes.append(
            "selective recompute is priced as none: attention's kernel recomputes its core in any"
            " case"
        )
        return "none"
    if parts == {NORMS} and not mixture and not shown[LATENTS]:
        notes.append(
            "recompute of layernorm is priced as none: dense layers have norms in the kernels of"
            " the products that read them"
        )
        return "none"
    missing = [MODULES[part] for part, has in shown.items() if has and part not in parts]
    missing += [MODULES[ROUTED]] if mixture and not shown[ROUTED] and ROUTED not in parts else []
    if missing:
        notes.append(f"recompute_modules is priced as with {' and '.join(missing)}")
    return BLOCK_KEEP
