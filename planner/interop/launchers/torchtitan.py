"""torchtitan: Python configurations (its config_registry.py), and the TOML files that it had until
February 2026, v0.2.2.

    tensor_parallel_degree, context_parallel_degree, pipeline_parallel_degree     tensor, sequence,
        stage
    enable_sequence_parallel                                                      tensor that cuts
        positions between products; on where it is not said
    expert_parallel_degree                                                        expert: taken from
        the sharded data-parallel ranks
    data_parallel_replicate_degree                                                data without
        sharding (ZeRO stage 0)
    data_parallel_shard_degree, fsdp_reshard_after_forward                        data with
        parameters gathered: "never" a second time is ZeRO stage 2, "always" 3
    num_tokens_per_microbatch_per_dp_rank, num_tokens_per_train_step,             rows and
        max_context_length, num_pp_microbatches                                   microbatches in
        Python: tokens, of which a row has max_context_length
    local_batch_size, global_batch_size, pipeline_parallel_microbatch_size        the same in TOML:
        gradients accumulate only without stages
    pipeline_parallel_schedule                                                    1F1B, GPipe;
        Interleaved1F1B: pipeline_parallel_layers_per_stage layers a virtual stage, two virtual
        stages where it is not said
    FullAC, SelectiveAC; mode of [activation_checkpoint] in TOML                  full: every block;
        selective: by operator (planner.pricing.frameworks.selective)

Source: torchtitan/config/configs.py, distributed/activation_checkpoint.py and
distributed/pipeline_parallel.py of pytorch/torchtitan, b5bcd76 (August 2026); for TOML
torchtitan/config/job_config.py of v0.2.2.
"""

from __future__ import annotations

from math import ceil, gcd
from typing import Any

from planner.errors import PlanError
from planner.execution.techniques import BLOCK_KEEP, INTERLEAVED, ZB_H1
from planner.interop import optimizers, precisions
from planner.interop.keys import Keys
from planner.interop.python_config import CLASS
from planner.interop.settings import Facts, Rounds, Settings, sharing

NAME, SUFFIX = "torchtitan", ".py"
MARKS = (
    r"\w+_parallel_degree|data_parallel_(shard|replicate)_degree|local_batch_size"
    r"|num_tokens_per_microbatch_per_dp_rank"
)
FIRST = ("trainer.parallelism", "trainer.training", "trainer.activation_checkpoint")
"""Sections whose value of a key counts: of reinforcement learning, whose generator has its own."""
SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", INTERLEAVED: "Interleaved1F1B"}
RESHARD = {1: "never", 2: "never", 3: "always"}
STAGED_ZERO = 1
"""ZeRO stage with pipeline stages: weights stay gathered and gradients whole until the last
microbatch's (PyTorch 2.10, torch/distributed/pipelining/stage.py, backward_maybe_with_nosync)."""
CLASSES = {"block": "FullAC", BLOCK_KEEP: "SelectiveAC"}
CHUNKS = 2
"""Virtual stages of a rank where Interleaved1F1B is said alone."""
WEIGHED = ("pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers")
STAGE_KEYS = ("pipeline_parallel_layers_per_stage", "module_fqns_per_model_part", *WEIGHED)
"""How layers lie on pipeline stages."""
"""Layers that the first and the last stage have less; 1 where it is not said."""


def round_off(rounds: Rounds, facts: Facts) -> list[str]:
    """Rounds settings to what torchtitan can express; returns what it cannot and what has no
    price."""
    rounds.usual("torchtitan", selective=True)
    if rounds.now.schedule == ZB_H1:
        rounds.to("its zero-bubble schedules divide stages otherwise: 1F1B", schedule="1f1b")
    s = rounds.now
    if s.virtual_stages not in (1, CHUNKS) and not _layers_each(s, facts):
        rounds.to(
            f"{facts.all_layers} layers are not as many on each virtual stage: {CHUNKS} of them",
            virtual_stages=CHUNKS,
        )
    zero = STAGED_ZERO if s.stage > 1 else 2
    if s.zero_stage == 0 and s.sequence * s.expert > 1:
        rounds.to(f"context and expert ranks shard parameters: ZeRO-{zero}", zero_stage=zero)
    if s.zero_stage == 1 < zero:
        rounds.to("sharded ranks scatter gradients too: ZeRO-2", zero_stage=zero)
    if s.zero_stage > zero == STAGED_ZERO:
        rounds.to("with stages gradients are scattered once a step: ZeRO-1", zero_stage=zero)
    if s.tensor > 1:
        rounds.to("tensor parallelism cuts positions between products", positions=True)
    return (
        [
            f"{facts.all_layers} layers on {s.stage} stages:"
            " pipeline_parallel_layers_per_stage says how they are divided"
        ]
        if facts.layers % s.stage or (s.stage > 1 and facts.beside)
        else []
    )


def _layers_each(s: Settings, facts: Facts) -> int:
    """Layers of each virtual stage, 0 where they are not alike."""
    per_stage, rest = divmod(facts.layers, s.stage * s.virtual_stages)
    return 0 if rest or facts.beside else per_stage * facts.each


def _degrees(s: Settings, facts: Facts) -> dict[str, Any]:
    """Keys of the section "parallelism" that both forms have."""
    keys: dict[str, Any] = {
        "data_parallel_replicate_degree": s.copies if s.zero_stage else s.replicas,
        "data_parallel_shard_degree": s.replicas // s.copies if s.zero_stage else 1,
    }
    if s.zero_stage:
        keys["fsdp_reshard_after_forward"] = RESHARD[s.zero_stage]
    keys |= {
        "tensor_parallel_degree": s.tensor,
        "context_parallel_degree": s.sequence,
        "expert_parallel_degree": s.expert,
        "pipeline_parallel_degree": s.stage,
    }
    if s.stage > 1:
        keys["pipeline_parallel_schedule"] = SCHEDULES[s.schedule]
        if per_stage := _layers_each(s, facts):
            keys |= {"pipeline_parallel_layers_per_stage": per_stage, **dict.fromkeys(WEIGHED, 0)}
    return keys


def write(s: Settings, facts: Facts) -> str:
    """A function that sets what the plan decides in a configuration. Raises PlanError P192 for rows
    without tokens, and for eight-bit products."""
    if not s.length:
        raise PlanError(
            "P192",
            "torchtitan counts tokens, and rows of this model have none",
            help=["-o FILE.toml counts rows (torchtitan v0.2.2)"],
        )
    if s.precision in precisions.IN_SOME_FORMS[NAME]:
        raise PlanError(
            "P192",
            f"a configuration of torchtitan in Python does not say {s.precision}: converters of a"
            " model stand in its model_registry",
            help=["-o FILE.toml says it (torchtitan v0.2.2)"],
        )
    parallel = _degrees(s, facts) | ({"enable_sequence_parallel": True} if s.tensor > 1 else {})
    parallel |= {"num_pp_microbatches": s.microbatches} if s.stage > 1 else {}
    training = {
        "num_tokens_per_microbatch_per_dp_rank": s.rows * s.length,
        "num_tokens_per_train_step": s.batch * s.length,
        "max_context_length": s.length,
        **precisions.words(NAME, s.precision),
    }
    sets = [
        f"    config.{section}.{key} = {value!r}"
        for section, keys in (("training", training), ("parallelism", parallel))
        for key, value in keys.items()
    ]
    policy = CLASSES.get(s.recompute, "")
    return "\n".join(
        [
            f"# {facts.model} on {s.devices} devices, {s.microbatches} microbatches. For a",
            "# config_registry.py of torchtitan (b5bcd76, August 2026): planned(a configuration).",
            *(
                [f"from torchtitan.distributed.activation_checkpoint import {policy}", "", ""]
                if policy
                else []
            ),
            "def planned(config):",
            *sets,
            f"    config.activation_checkpoint = {f'{policy}.Config()' if policy else None}",
            "    return config",
            "",
        ]
    )


def write_toml(s: Settings, facts: Facts) -> str:
    """The keys that the plan decides, to be merged into a job's TOML file of v0.2.2."""
    parallel = _degrees(s, facts)
    parallel |= {"pipeline_parallel_microbatch_size": s.rows} if s.stage > 1 else {}
    precision = dict(precisions.words(NAME, s.precision))
    converters = precision.pop("converters", None)
    training = {
        "local_batch_size": s.rows * (s.microbatches if s.stage > 1 else 1),
        "global_batch_size": s.batch,
        **({"seq_len": s.length} if s.length else {}),
        **precision,
    }
    policy = {"mode": {"block": "full", BLOCK_KEEP: "selective"}.get(s.recompute, "none")}
    policy |= {"selective_ac_option": "op"} if s.recompute == BLOCK_KEEP else {}
    lines = [
        f"# {facts.model} on {s.devices} devices, {s.microbatches} microbatches. Merge into a"
        " job's file of torchtitan v0.2.2."
    ]
    for section, keys in (
        *([("model", {"converters": converters})] if converters else []),
        ("training", training),
        ("parallelism", parallel),
        ("activation_checkpoint", policy),
    ):
        lines += [f"[{section}]"]
        lines += [
            f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}"
            for key, value in keys.items()
        ]
        lines += [""]
    return "\n".join(lines)


FORMS = {".toml": write_toml}
"""How a file ends -> what writes it; any other is Python."""


def read(keys: Keys, devices: int, domain: int) -> tuple[Settings, list[str]]:
    """Settings of a configuration and what it says beyond them. Raises PlanError P191 where keys
    contradict each other."""
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
    ep = _expert_ranks(ep, replicate, shard, cp * tp, notes)
    if keys.get("enable_cpu_offload"):
        notes.append("enable_cpu_offload is left out: all is priced on the devices")
    if keys.get("module_fqns_per_model_part"):
        notes.append("module_fqns_per_model_part is left out: stages are priced alike")
    notes += optimizers.notes_of(keys, "optimizer.name")
    keys.get("pipeline_parallel_schedule")  # there may be one without stages
    schedule = _schedule(keys, notes) if pp > 1 else ""
    positions = keys.flag(True, "enable_sequence_parallel") and tp > 1
    zero = _zero_stage(keys, pp, notes) if shard * cp > 1 else 0
    copies = replicate if zero else 1
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
            zero_group=sharing(copies, replicas // ep, devices // pp, domain, notes),
            recompute=_recompute(keys, notes),
            schedule=schedule,
            positions=positions,
            length=keys.whole(0, "seq_len", "max_context_length"),
            virtual_stages=_virtual_stages(keys, pp, notes) if schedule == INTERLEAVED else 1,
            precision=precisions.read(NAME, keys, notes),
        ),
        notes,
    )


def _expert_ranks(ranks: int, replicate: int, shard: int, inner: int, notes: list[str]) -> int:
    """Data-parallel ranks that experts are parted among. ranks: those of a file, of which tensor
    and context ranks (`inner` of them) may be some. Raises PlanError P191."""
    if replicate * shard % ranks == 0:
        return ranks
    if shard * inner % ranks:
        raise PlanError(
            "P191",
            f"expert_parallel_degree {ranks} does not divide the {replicate * shard} data-parallel"
            " ranks",
            help=["--devices as many as the configuration runs on"],
        )
    priced = gcd(ranks, shard)
    notes.append(
        f"experts over {ranks} ranks, tensor or context ranks among them, are priced as over"
        f" {priced} of the sharded ones"
    )
    return priced


def _batch(keys: Keys, replicas: int, stages: int, notes: list[str]) -> tuple[int, int]:
    """(rows of a step, microbatches). Raises PlanError P191 where they do not divide."""
    if _counts_tokens(keys):
        return _tokens(keys, replicas, stages, notes)
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


def _counts_tokens(keys: Keys) -> bool:
    """Whether a file is of a version that counts tokens."""
    names = ("num_tokens_per_microbatch_per_dp_rank", "num_tokens_per_train_step")
    return any(name in keys for name in names)


def _tokens(keys: Keys, replicas: int, stages: int, notes: list[str]) -> tuple[int, int]:
    """The same where tokens are counted: a forward pass takes those of one microbatch."""
    length = keys.whole(2048, "max_context_length", "seq_len")
    tokens_each = keys.whole(16384, "num_tokens_per_microbatch_per_dp_rank")
    passes = keys.whole(1, "num_pp_microbatches")
    passes = passes if stages > 1 else 1
    step = keys.whole(-1, "num_tokens_per_train_step", least=-1)
    step = tokens_each * passes * replicas if step == -1 else step
    accumulated, rest = divmod(step, tokens_each * passes * replicas)
    if rest or not accumulated:
        raise PlanError(
            "P191",
            f"num_tokens_per_train_step {step} is no multiple of {tokens_each} tokens x {passes}"
            f" microbatches x {replicas} data-parallel ranks",
        )
    if tokens_each % length:
        raise PlanError(
            "P191",
            f"num_tokens_per_microbatch_per_dp_rank {tokens_each} is no multiple of"
            " max_context_length"
            f" {length}: rows are priced whole",
        )
    if accumulated > 1 and stages > 1:
        notes.append(
            f"{accumulated} rounds of the pipeline a step are priced as one: their bubbles are"
            " left out"
        )
    return step // length, accumulated * passes


def _virtual_stages(keys: Keys, stages: int, notes: list[str]) -> int:
    """Virtual stages of a rank. Raises PlanError P191 where layers do not fill as many on each."""
    per_stage = keys.whole(0, "pipeline_parallel_layers_per_stage")
    less = sum(keys.whole(1, name, least=0) for name in WEIGHED)
    if not per_stage:
        return CHUNKS
    layers = keys.layers()
    if not layers:
        notes.append(f"the model's layers are not known: {CHUNKS} virtual stages are priced")
        return CHUNKS
    virtual, rest = divmod(ceil((layers + less) / per_stage), stages)
    if rest or virtual < 2:
        raise PlanError(
            "P191",
            f"{layers} layers, {less} less at the ends, {per_stage} each are no whole number of"
            f" virtual stages above 1 on {stages} ranks (pipeline_parallel_layers_per_stage)",
        )
    return virtual


def _schedule(keys: Keys, notes: list[str]) -> str:
    word = keys.word("1f1b", "pipeline_parallel_schedule")
    if word == SCHEDULES[INTERLEAVED].lower():
        return INTERLEAVED
    if word in SCHEDULES:
        for name in ("pipeline_parallel_layers_per_stage", *WEIGHED):
            keys.get(name)  # stages are priced alike
        return word
    notes.append(f"schedule {word} is priced as plain 1F1B")
    return "1f1b"


def _zero_stage(keys: Keys, stages: int, notes: list[str]) -> int:
    word = keys.word("default", "fsdp_reshard_after_forward")
    if word not in ("default", "always", "never"):
        raise PlanError(
            "P191", f"fsdp_reshard_after_forward = {word!r}", help=["default, always or never"]
        )
    if stages > 1:
        if word == "always":
            notes.append(f"ZeRO-3 with stages is priced as ZeRO-{STAGED_ZERO}")
        return STAGED_ZERO
    return 2 if word == "never" else 3


POLICIES = {"fullac": "full", "selectiveac": "selective", "memorybudgetac": "memory_budget"}
"""Classes of activation_checkpoint in Python -> modes in TOML."""


def _recompute(keys: Keys, notes: list[str]) -> str:
    called = keys.word("", CLASS).removesuffix(".config").rpartition(".")[2]
    off = "activation_checkpoint" in keys and keys.get("activation_checkpoint") is None
    word = POLICIES.get(called) or keys.word("none" if off else "selective", "mode")
    if word not in ("none", "full", "selective", "memory_budget"):
        raise PlanError(
            "P191",
            f"[activation_checkpoint] mode = {word!r}",
            help=["none, selective, full or memory_budget"],
        )
    older = any(name in keys for name in ("local_batch_size", "seq_len", "mode"))
    option = keys.word("2" if older and not called else "op", "selective_ac_option")
    if word == "full" or (word == "selective" and option == "1"):
        return "block"
    if word == "selective" and option == "op":
        return BLOCK_KEEP
    if word != "none":
        which = f", option {option}," if word == "selective" else ""
        notes.append(f"{word.replace('_', ' ')} recompute{which} is priced as none")
    return "none"
