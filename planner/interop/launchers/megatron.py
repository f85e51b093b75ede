"""Megatron-LM: keys of `--yaml-cfg` files, which are its command line's with underscores.

    tensor_model_parallel_size, context_parallel_size, pipeline_model_parallel_size    tensor,
        sequence, stage
    expert_model_parallel_size                                                         expert: taken
        from the data-parallel ranks
    micro_batch_size, global_batch_size                                                rows, batch
    use_distributed_optimizer                                                          ZeRO stage 1
    use_megatron_fsdp, data_parallel_sharding_strategy                                 ZeRO stages 2
        (optim_grads) and 3 (optim_grads_params)
    recompute_granularity                                                              full: every
        block; selective: attention's core, as the planner's kernels do

Source: examples/gpt3/gpt_config.yaml and megatron/training/arguments.py of NVIDIA/Megatron-LM.
"""

from __future__ import annotations

from planner.errors import PlanError
from planner.execution.techniques import INTERLEAVED
from planner.interop.keys import Keys
from planner.interop.settings import Facts, Rounds, Settings

NAME, SUFFIX = "megatron", ".yaml"
MARKS = r"\w+_model_parallel_size|context_parallel_size|micro_batch_size"
SHARDING = {2: "optim_grads", 3: "optim_grads_params"}


def round_off(rounds: Rounds, facts: Facts) -> list[str]:
    """Rounds settings to what Megatron can express; returns what it cannot and what has no
    price."""
    rounds.usual("Megatron")
    if rounds.now.schedule == "gpipe":
        rounds.to("its schedule is 1F1B", schedule="1f1b")
    if facts.layers and facts.layers % rounds.now.stage:
        return [
            f"{facts.layers} blocks on {rounds.now.stage} stages: say how they are divided"
            " (decoder_first_pipeline_num_layers)"
        ]
    return []


def write(s: Settings, facts: Facts) -> str:
    """The keys that the plan decides, to be merged into a configuration."""
    flag = {True: "True", False: "False"}
    recompute = (
        [
            "  recompute_granularity: full",
            "  recompute_method: uniform",
            "  recompute_num_layers: 1",
        ]
        if s.recompute == "block"
        else ["  recompute_granularity: null"]
    )
    chunks = s.virtual_stages if s.virtual_stages > 1 else "null"
    lines = [
        (
            f"# {facts.model} on {s.devices} devices: data_parallel_size {s.replicas},"
            f" {s.microbatches} microbatches. Merge into a file for --yaml-cfg."
        ),
        "language_model:",
        *recompute,
        "model_parallel:",
        f"  tensor_model_parallel_size: {s.tensor}",
        f"  context_parallel_size: {s.sequence}",
        f"  pipeline_model_parallel_size: {s.stage}",
        f"  virtual_pipeline_model_parallel_size: {chunks}",
        f"  sequence_parallel: {flag[s.positions]}",
        f"  expert_model_parallel_size: {s.expert}",
        f"micro_batch_size: {s.rows}",
        f"global_batch_size: {s.batch}",
        *([f"seq_length: {s.length}"] if s.length else []),
        f"use_distributed_optimizer: {flag[s.zero_stage > 0]}",
    ]
    if s.zero_stage in SHARDING:
        lines += [
            "use_megatron_fsdp: True",
            f"data_parallel_sharding_strategy: {SHARDING[s.zero_stage]}",
        ]
    return "\n".join(lines) + "\n"


def read(keys: Keys, devices: int, domain: int) -> tuple[Settings, list[str]]:
    """Settings of a configuration and what it says beyond them; it knows of no domains. Raises
    PlanError P191 where keys contradict each other."""
    notes: list[str] = []
    tp, cp, pp = (
        keys.whole(1, k)
        for k in (
            "tensor_model_parallel_size",
            "context_parallel_size",
            "pipeline_model_parallel_size",
        )
    )
    ep = keys.whole(1, "expert_model_parallel_size")
    replicas, rest = divmod(devices, tp * cp * pp)
    if rest or not replicas:
        raise PlanError(
            "P191",
            f"tensor {tp} x context {cp} x pipeline {pp} does not divide {devices} devices",
            help=["--devices as many as the configuration runs on"],
        )
    if replicas % ep:
        raise PlanError(
            "P191",
            f"expert_model_parallel_size {ep} does not divide the {replicas} data-parallel ranks",
        )
    batch, microbatches = _batch(keys, replicas)
    virtual = keys.whole(1, "virtual_pipeline_model_parallel_size")
    virtual = virtual if pp > 1 else 1
    if keys.get("num_layers_per_virtual_pipeline_stage") is not None and virtual == 1:
        notes.append("interleaved stages are priced as plain 1F1B: their bubble is smaller")
    if keys.get("rampup_batch_size") is not None:
        notes.append("rampup_batch_size is left out: the full batch is priced")
    positions = keys.flag(False, "sequence_parallel") and tp > 1
    zero = _zero_stage(keys, pp, notes)
    return (
        Settings(
            batch=batch,
            stage=pp,
            data=replicas // ep,
            expert=ep,
            sequence=cp,
            tensor=tp,
            microbatches=microbatches,
            zero_stage=zero,
            recompute=_recompute(keys, notes),
            schedule=INTERLEAVED if virtual > 1 else "1f1b" if pp > 1 else "",
            positions=positions,
            length=keys.whole(0, "seq_length"),
            virtual_stages=virtual,
        ),
        notes,
    )


def _batch(keys: Keys, replicas: int) -> tuple[int, int]:
    """(rows of a step, microbatches). Raises PlanError P191 where they do not divide."""
    rows = keys.whole(0, "micro_batch_size")
    if not rows:
        raise PlanError(
            "P191", "micro_batch_size is missing", help=["Megatron asks for it as well"]
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
        keys.word("no_shard", "data_parallel_sharding_strategy"),
    )
    known = {"no_shard": 0, "optim": 1, **{word: zero for zero, word in SHARDING.items()}}
    if sharding not in known:
        raise PlanError(
            "P191",
            f"data_parallel_sharding_strategy = {sharding!r}",
            help=[f"one of {', '.join(known)}"],
        )
    zero = max(int(keys.flag(False, "use_distributed_optimizer")), known[sharding] if fsdp else 0)
    if known[sharding] and not fsdp:
        notes.append("data_parallel_sharding_strategy says nothing without use_megatron_fsdp")
    if zero == 3 and stages > 1:
        notes.append("ZeRO-3 with stages is priced as ZeRO-2")
        return 2
    return zero


def _recompute(keys: Keys, notes: list[str]) -> str:
    word = keys.word("", "recompute_granularity")
    if word not in ("", "full", "selective"):
        raise PlanError(
            "P191", f"recompute_granularity = {word!r}", help=["full, selective or null"]
        )
    if word == "selective":
        notes.append(
            "selective recompute is priced as none: attention's kernel recomputes its core in any"
            " case"
        )
    if word == "full" and keys.word("uniform", "recompute_method") == "block":
        notes.append("recompute_method block is priced as recompute of every block")
    keys.get("recompute_num_layers", "recompute_modules")
    return "block" if word == "full" else "none"
