"""torchtitan: tables [parallelism], [training] and [activation_checkpoint] of its TOML files.

    tensor_parallel_degree, context_parallel_degree, pipeline_parallel_degree     tensor, sequence,
        stage
    expert_parallel_degree                                                        expert: taken from
        the sharded data-parallel ranks
    data_parallel_replicate_degree                                                data without
        sharding (ZeRO stage 0)
    data_parallel_shard_degree, fsdp_reshard_after_forward                        data with
        parameters gathered: "never" a second time is ZeRO stage 2, "always" 3
    local_batch_size, global_batch_size, pipeline_parallel_microbatch_size        rows and
        microbatches: gradients accumulate only without stages
    mode of [activation_checkpoint]                                               full: every block

Source: torchtitan/config/job_config.py of pytorch/torchtitan.
"""

from __future__ import annotations

from planner.errors import PlanError
from planner.execution.techniques import MAX_ZERO_STAGE
from planner.interop.keys import Keys
from planner.interop.settings import Facts, Rounds, Settings

NAME, SUFFIX = "torchtitan", ".toml"
MARKS = r"\w+_parallel_degree|data_parallel_(shard|replicate)_degree|local_batch_size"
SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe"}
RESHARD = {1: "never", 2: "never", 3: "always"}


def round_off(rounds: Rounds, facts: Facts) -> list[str]:
    """Rounds settings to what torchtitan can express; returns what it cannot and what has no
    price."""
    rounds.usual("torchtitan")
    s = rounds.now
    if s.virtual_stages > 1:
        rounds.to("one virtual stage per stage: plain 1F1B", schedule="1f1b", virtual_stages=1)
    zero = MAX_ZERO_STAGE.get(s.schedule, 2)
    if s.zero_stage == 0 and s.sequence * s.expert > 1:
        rounds.to(f"context and expert ranks shard parameters: ZeRO-{zero}", zero_stage=zero)
    if s.zero_stage == 1:
        rounds.to("sharded ranks scatter gradients too: ZeRO-2", zero_stage=zero)
    if s.tensor > 1:
        rounds.to("tensor parallelism cuts positions between products", positions=True)
    return (
        [
            f"{facts.layers} blocks on {s.stage} stages: pipeline_parallel_layers_per_stage says"
            " how they are divided"
        ]
        if facts.layers % s.stage
        else []
    )


def write(s: Settings, facts: Facts) -> str:
    """The keys that the plan decides, to be merged into a configuration."""
    local = s.rows * (s.microbatches if s.stage > 1 else 1)
    lines = [
        (
            f"# {facts.model} on {s.devices} devices, {s.microbatches} microbatches. Merge into a"
            " job's file."
        ),
        "[training]",
        f"local_batch_size = {local}",
        f"global_batch_size = {s.batch}",
        *([f"seq_len = {s.length}"] if s.length else []),
        "",
        "[parallelism]",
        f"data_parallel_replicate_degree = {1 if s.zero_stage else s.replicas}",
        f"data_parallel_shard_degree = {s.replicas if s.zero_stage else 1}",
        *([f'fsdp_reshard_after_forward = "{RESHARD[s.zero_stage]}"'] if s.zero_stage else []),
        f"tensor_parallel_degree = {s.tensor}",
        f"context_parallel_degree = {s.sequence}",
        f"expert_parallel_degree = {s.expert}",
        f"pipeline_parallel_degree = {s.stage}",
    ]
    if s.stage > 1:
        lines += [
            f'pipeline_parallel_schedule = "{SCHEDULES[s.schedule]}"',
            f"pipeline_parallel_microbatch_size = {s.rows}",
        ]
    return (
        "\n".join(
            [
                *lines,
                "",
                "[activation_checkpoint]",
                f'mode = "{"full" if s.recompute == "block" else "none"}"',
            ]
        )
        + "\n"
    )


def read(keys: Keys, devices: int, domain: int) -> tuple[Settings, list[str]]:
    """Settings of a configuration and what it says beyond them; it knows of no domains. Raises
    PlanError P191 where keys contradict each other."""
    notes: list[str] = []
    tp, cp, pp, ep = (
        keys.whole(1, f"{k}_parallel_degree") for k in ("tensor", "context", "pipeline", "expert")
    )
    replicate = keys.whole(1, "data_parallel_replicate_degree")
    shard = keys.whole(-1, "data_parallel_shard_degree", least=-1)
    remaining, rest = divmod(devices, tp * cp * pp * replicate)
    shard = remaining if shard == -1 else shard
    if rest or shard < 1 or tp * cp * pp * replicate * shard != devices:
        raise PlanError(
            "P191",
            f"replicate {replicate} x shard {shard} x tensor {tp} x context {cp} x pipeline {pp} is"
            f" not {devices} devices",
            help=["--devices as many as the configuration runs on"],
        )
    replicas = replicate * shard
    if replicas % ep:
        raise PlanError(
            "P191",
            f"expert_parallel_degree {ep} does not divide the {replicas} data-parallel ranks",
            help=["an expert axis beside the context axis is not built"],
        )
    if replicate > 1 and shard > 1:
        notes.append("hybrid sharding is priced as sharding over all replicas")
    schedule = _schedule(keys, notes) if pp > 1 else ""
    zero = _zero_stage(keys, pp, schedule, notes) if shard * cp > 1 else 0
    batch, microbatches = _batch(keys, replicas, pp, notes)
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
            schedule=schedule,
            positions=tp > 1,
            length=keys.whole(0, "seq_len"),
        ),
        notes,
    )


def _batch(keys: Keys, replicas: int, stages: int, notes: list[str]) -> tuple[int, int]:
    """(rows of a step, microbatches). Raises PlanError P191 where they do not divide."""
    local = keys.whole(8, "local_batch_size", "batch_size")
    batch = keys.whole(-1, "global_batch_size", least=-1)
    batch = local * replicas if batch == -1 else batch
    accumulated, rest = divmod(batch, local * replicas)
    if rest or not accumulated:
        raise PlanError(
            "P191",
            f"global_batch_size {batch} is no multiple of local_batch_size {local} x {replicas}"
            " data-parallel ranks",
        )
    microbatches = accumulated
    if stages > 1:
        rows = keys.whole(1, "pipeline_parallel_microbatch_size")
        if local % rows:
            raise PlanError(
                "P191",
                f"local_batch_size {local} is no multiple of pipeline_parallel_microbatch_size"
                f" {rows}",
            )
        microbatches *= local // rows
        if accumulated > 1:
            notes.append(
                f"{accumulated} rounds of the pipeline a step are priced as one: their bubbles are"
                " left out"
            )
    return batch, microbatches


def _schedule(keys: Keys, notes: list[str]) -> str:
    word = keys.word("1f1b", "pipeline_parallel_schedule")
    if word in SCHEDULES:
        return word
    notes.append(f"schedule {word} is priced as plain 1F1B")
    return "1f1b"


def _zero_stage(keys: Keys, stages: int, schedule: str, notes: list[str]) -> int:
    word = keys.word("default", "fsdp_reshard_after_forward")
    if word not in ("default", "always", "never"):
        raise PlanError(
            "P191", f"fsdp_reshard_after_forward = {word!r}", help=["default, always or never"]
        )
    zero = 3 if word == "always" or (word == "default" and stages == 1) else 2
    if stages > 1 and zero > MAX_ZERO_STAGE[schedule]:
        if zero == 3:
            notes.append(f"ZeRO-3 with stages is priced as ZeRO-{MAX_ZERO_STAGE[schedule]}")
        return MAX_ZERO_STAGE[schedule]
    return zero


def _recompute(keys: Keys, notes: list[str]) -> str:
    word = keys.word("selective", "mode")
    if word not in ("none", "full", "selective", "memory_budget"):
        raise PlanError(
            "P191",
            f"[activation_checkpoint] mode = {word!r}",
            help=["none, selective, full or memory_budget"],
        )
    option = keys.word("2", "selective_ac_option")
    if word == "full" or (word == "selective" and option == "1"):
        return "block"
    if word != "none":
        notes.append(f"{word.replace('_', ' ')} recompute ({option}) is priced as none")
    return "none"
