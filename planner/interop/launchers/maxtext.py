"""MaxText: keys of its base.yml.

    ici_*_parallelism, dcn_*_parallelism       degrees within a fast domain (node or slice) and
                                               between them, multiplied
    data, fsdp, pipeline, expert               replicas without and with sharded parameters (ZeRO
                                               stages 0 and 3), stage, expert; fsdp_transpose is
                                               fsdp over another dim
    context (or sequence), tensor              sequence, tensor; tensor_sequence: tensor that cuts
                                               positions between products; context_usp_ulysses:
                                               sequence by exchange of heads
    shard_optimizer_over_data                  ZeRO stage 1
    per_device_batch_size                      rows of all devices of a microbatch / devices
    gradient_accumulation_steps                microbatches; with stages num_pipeline_microbatches,
                                               a multiple of the stages
    pipeline                                   one loop over all microbatches, derived by autodiff:
                                               GPipe; num_pipeline_repeats of it, where stages hold
                                               fewer layers than there are (circular)
    remat_policy                               full: recompute of every block; none; presets and
                                               custom: by name, custom with a key for each value
                                               (device, offload, remat);
                                               decoder_layer_input: what enters blocks
    scan_layers                                layers in a loop, or written out

Keys that a file does not have are base.yml's: ici_fsdp_parallelism and dcn_data_parallelism take
the devices that are left. Source: src/maxtext/configs/base.yml and layers/decoders.py of
AI-Hypercomputer/maxtext, e591f30 (August 2026).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import gcd, prod

from planner.errors import PlanError, did_you_mean
from planner.execution.save_policies import (
    NAMES,
    OFFLOADED_PRESETS,
    PRESETS,
    kept_among,
    offloaded_values,
    saved_names,
    saving,
)
from planner.execution.techniques import MAX_ZERO_STAGE, WAITING
from planner.interop import adapters, optimizers, precisions
from planner.interop.keys import Keys
from planner.interop.launchers import maxtext_models
from planner.interop.model_sizes import (
    GROUPS,
    HEADS,
    HIDDEN,
    INNER,
    LAYERS,
    VOCABULARY,
    Claim,
    claims_of,
)
from planner.interop.settings import AXES, Facts, Rounds, Settings, sharing
from planner.machine.mesh_choices import pinned_mesh
from planner.machine.topology import fast_levels

NAME, SUFFIX = "maxtext", ".yml"
MARKS = r"(ici|dcn)_\w+_parallelism|per_device_batch_size|base_config"
SUMS = {
    "stage": ("pipeline",),
    "data": ("data", "fsdp", "fsdp_transpose"),
    "expert": ("expert",),
    "sequence": ("context", "context_usp_ulysses", "sequence"),
    "tensor": ("tensor", "tensor_sequence"),
}
WRITTEN = ("data", "fsdp", "context", "tensor", "tensor_sequence", "pipeline", "expert")
VALUES = {
    "q": ("query_proj",),
    "k": ("key_proj",),
    "v": ("value_proj",),
    "context": ("context",),
    "out_proj": ("out_proj",),
    "mlp_gate": ("mlpwi_0",),
    "mlp_up": ("mlpwi_1", "mlpwi"),
    "mlp_down": ("mlpwo",),
}
"""Names of values that remat_policy knows -> the keys that say where they are kept."""
FUSED = {"qkv_proj": ("q", "k", "v")}
"""Keys of several values."""
LIKE = {
    "minimal_flash": ("minimal_with_context", ""),
    "minimal_with_quantization": ("minimal", "quantised copies are not saved"),
    "minimal_with_context_and_quantization": (
        "minimal_with_context",
        "quantised copies are not saved",
    ),
}
"""Presets that are priced as another, and what differs."""
ENTERS = "decoder_layer_input"
"""The key of what enters a block."""
LEFT_OUT = {
    "optimizer_memory_host_offload": "the optimizer's state is priced on the devices",
    "parameter_memory_host_offload": "parameters are priced on the devices",
    "custom_mesh_and_rule": "axes are priced as base.yml's rules use them",
    "custom_mesh": "devices are priced in the order of the mesh's axes",
    "pipeline_parallel_layers": "all layers are priced in stages",
    "mtp_num_layers": "the layers of multi-token prediction are those of the model, or not priced",
    "shard_exp_on_fsdp": "experts are priced as cut by the axis expert alone",
    "fsdp_shard_on_exp": "experts are priced as cut by the axis expert alone",
    "use_ring_of_experts": "rows are priced as sent to their experts",
    "enable_diloco": "every step is priced with a sum over all replicas",
    "use_dpo": "a step is priced without the reference model",
    "enable_rampup_batch_size": "the full batch is priced",
}
"""Keys that change the program and have no price here, and what is priced instead."""
UNSET = {"ici": "ici_fsdp_parallelism", "dcn": "dcn_data_parallelism"}
"""Network -> the axis that base.yml leaves open."""
SIZES = {
    LAYERS: ("base_num_decoder_layers",),
    HIDDEN: ("base_emb_dim",),
    HEADS: ("base_num_query_heads",),
    GROUPS: ("base_num_kv_heads",),
    INNER: ("base_mlp_dim",),
    VOCABULARY: ("vocab_size",),
}


def round_off(rounds: Rounds, facts: Facts) -> list[str]:
    """Rounds settings to what MaxText can express; returns what it cannot and what has no price."""
    named = saved_names(rounds.now.recompute)
    if rounds.now.zero_stage < 3:
        rounds.to("optimizer state cut over all replicas, not in groups of them", zero_group=0)
    rounds.usual("MaxText", by_name=True)
    if other := ", ".join(n for n in named if n not in VALUES):
        known = kept_among(rounds.now.recompute, VALUES)
        rounds.to(f"no value there is called as {other}", recompute=known)
    s, inexpressible = rounds.now, []
    if s.stage > 1:
        if facts.layers % s.stage:
            raise PlanError(
                "P192",
                f"MaxText puts {facts.layers} blocks on {s.stage} stages only where they divide",
                help=["plan with another number of stages: --pin pp=N"],
            )
        rounds.microbatches("MaxText", s.stage)
        rounds.to(
            "every microbatch runs forward before the first runs backward (GPipe)",
            schedule="gpipe",
            virtual_stages=1,
            zero_stage=min(s.zero_stage, MAX_ZERO_STAGE["gpipe"]),
        )
    if rounds.now.zero_stage == 2:
        rounds.to("gradients are not scattered without parameters: ZeRO-1", zero_stage=1)
    if s.zero_stage == 3 and s.data == 1:
        rounds.to("parameters are sharded over fsdp ranks, and there is one: ZeRO-1", zero_stage=1)
    if s.sequence > 1 and s.zero_stage < 3:
        inexpressible.append(
            "the context axis also shards weights there (logical_axis_rules, embed)"
        )
    return inexpressible


def claims(keys: Keys) -> tuple[Claim, ...]:
    """The sizes of the model that a file says, or its model_name, where they are not scaled. Raises
    PlanError P191."""
    name = keys.word("default", "model_name")
    if keys.whole(1, "global_parameter_scale") > 1:
        return ()
    if name in ("default", ""):
        return claims_of(keys, SIZES)
    layers, hidden = maxtext_models.SIZES.get(name, (0, 0))
    if not layers or keys.flag(False, "override_model_config"):
        return ()
    of = f"model_name {name}"
    return (
        Claim(f"{of}, with base_num_decoder_layers", LAYERS, layers, layers),
        Claim(f"{of}, with base_emb_dim", HIDDEN, hidden, hidden),
    )


def write_overrides(s: Settings, facts: Facts) -> str:
    """The same as an array of a launch script: what comes behind base.yml."""
    title, *lines = write(s, facts).splitlines()
    arguments = [f"    {line.replace(': ', '=', 1)}" for line in lines]
    title = title.partition(". Merge")[0]
    return "\n".join(
        [
            f'{title}. Behind the configuration of a launch script: "${{PLANNED_ARGS[@]}}".',
            "PLANNED_ARGS=(",
            *arguments,
            ")",
            "",
        ]
    )


FORMS = {".sh": write_overrides}
"""How a file ends -> what writes it; any other is YAML."""


def write(s: Settings, facts: Facts) -> str:
    """The keys that the plan decides, to be merged into a configuration."""
    named = {
        "pipeline": "stage",
        "fsdp" if s.zero_stage == 3 else "data": "data",
        "expert": "expert",
        "context": "sequence",
        "tensor_sequence" if s.positions else "tensor": "tensor",
    }
    inner = _inner(s, facts)
    if s.copies > 1 and s.zero_stage == 3:
        named |= {"data": "copies"}
        inner |= _with_copies(s.copies, *inner["data"])
    lines = [
        f"# {facts.model} on {s.devices} devices, {s.microbatches} microbatches. Merge into a"
        " configuration that starts from base.yml."
    ]
    for word, part in (("ici", 0), ("dcn", 1)):
        lines += [
            f"{word}_{k}_parallelism: {inner[named[k]][part] if k in named else 1}" for k in WRITTEN
        ]
    # A step's rows on each device; with stages all microbatches are one step of the loop.
    steps = 1 if s.stage > 1 else s.microbatches
    lines += [
        f"shard_optimizer_over_data: {s.zero_stage == 1}",
        f"per_device_batch_size: {s.batch / (s.devices * steps):.12g}",
        f"gradient_accumulation_steps: {steps}",
    ]
    if s.stage > 1:
        lines += [
            f"num_layers_per_pipeline_stage: {facts.layers * facts.each // s.stage}",
            f"num_pipeline_microbatches: {s.microbatches}",
        ]
    lines += ["scan_layers: False"] * s.written_out
    lines += [f"{k}: {v}" for k, v in precisions.words(NAME, s.precision).items()]
    lines += [*([f"max_target_length: {s.length}"] if s.length else []), *_remat_lines(s)]
    return "\n".join(lines) + "\n"


def _with_copies(copies: int, fast: int, slow: int) -> dict[str, tuple[int, int]]:
    """Degrees of the axis data within a fast domain and between domains, as so many copies, the
    outermost, and what is sharded over the rest."""
    between = gcd(copies, slow)
    within = copies // between
    return {"copies": (within, between), "data": (fast // within, slow // between)}


def _remat_lines(s: Settings) -> list[str]:
    """The policy: a preset where one has these names (without gates those without), else custom,
    with the keys of what is saved, and of what waits in the host's memory."""
    named, away = saved_names(s.recompute), offloaded_values(s.recompute)
    policies = {p: saving(names) for p, names in PRESETS.items()}
    policies |= {p: saving((), names) for p, names in OFFLOADED_PRESETS.items()}
    for preset, policy in policies.items() if not s.offload else ():
        plain = kept_among(policy, [n for n in NAMES if n != "mlp_gate"])
        if s.recompute in (policy, *([plain] if named else [])):
            return [f"remat_policy: '{preset}'"]
    if not named and not s.offload:
        return ["remat_policy: 'none'"]
    keys = dict.fromkeys((key, n in away) for n in named for key in VALUES[n])
    lines = [f"{key}: '{'offload' if sent else 'device'}'" for key, sent in keys]
    entering = [f"{ENTERS}: 'offload'"] if s.offload else []
    return ["remat_policy: 'custom'", *entering, *lines]


def _recompute(keys: Keys, notes: list[str]) -> str:
    """What is recomputed. Raises PlanError P191 for a policy that there is not."""
    remat = keys.word("full", "remat_policy")
    preset, differs = LIKE.get(remat, (remat, ""))
    if differs:
        notes.append(f"remat_policy {remat} is priced as {preset}: {differs}")
    if preset in PRESETS:
        return saving(PRESETS[preset])
    if preset in OFFLOADED_PRESETS:
        return saving((), OFFLOADED_PRESETS[preset])
    if remat == "custom":
        return _custom(keys, notes)
    if remat == "none":
        return "none"
    policies = ["none", "custom", *PRESETS, *OFFLOADED_PRESETS, *LIKE]
    raise PlanError(
        "P191",
        f"remat_policy = {remat!r}",
        help=[did_you_mean(remat, policies) or f"one of {', '.join(policies)}"],
    )


def _offload(keys: Keys) -> tuple[str, ...]:
    """Whether what enters blocks waits in the host's memory."""
    custom = keys.word("full", "remat_policy") == "custom"
    return ("activations",) if custom and keys.word("device", ENTERS) == "offload" else ()


def _custom(keys: Keys, notes: list[str]) -> str:
    """The values that a custom policy saves, and those of them that it offloads."""
    names = {key: (n,) for n, spellings in VALUES.items() for key in spellings} | FUSED
    kept: dict[str, set[str]] = {"device": set(), "offload": set()}
    for key, values in names.items():
        place = keys.word("remat", key)
        if place in kept:
            kept[place].update(values)
        elif place != "remat":
            notes.append(f"{key} '{place}' is priced as 'remat'")
    return saving(kept["device"] - kept["offload"], kept["offload"])


def _said(keys: Keys, key: str) -> bool:
    """Whether a key says something: base.yml has "", -1 and false where it does not."""
    return keys.some(key) not in (None, "", -1, 0, False)


def _inner(s: Settings, facts: Facts) -> dict[str, tuple[int, int]]:
    """Axis -> its degrees within a fast domain and between domains."""
    fast = fast_levels(facts.topology)
    mesh = {a.name: a for a in pinned_mesh(facts.topology, s.mesh).axes}
    parts = {a: mesh[a].parts if a in mesh else () for a in AXES}
    return {
        a: (prod(n for i, n in p if i in fast), prod(n for i, n in p if i not in fast))
        for a, p in parts.items()
    }


def read(keys: Keys, devices: int, domain: int) -> tuple[Settings, list[str]]:
    """Settings of a configuration and what it says beyond them. Raises PlanError P191 where keys
    contradict each other."""
    notes: list[str] = []
    keys.get("base_config")
    sizes = _degrees(keys, devices, domain)
    degrees = {axis: prod(sizes.get(k, 1) for k in names) for axis, names in SUMS.items()}
    other = [
        k for k, n in sizes.items() if n > 1 and not any(k in names for names in SUMS.values())
    ]
    if other:
        raise PlanError(
            "P191",
            f"{', '.join(f'{k}_parallelism' for k in other)} above 1: the planner has no such axis",
            help=["fold it into fsdp or tensor"],
        )
    if sizes.get("tensor", 1) > 1 and sizes.get("tensor_sequence", 1) > 1:
        notes.append(
            "tensor and tensor_sequence are priced as one axis that cuts positions between products"
        )
    stages = degrees["stage"]
    zero, sharded = _zero_stage(keys, sizes, stages, notes), _is_sharded(sizes)
    copies = sizes.get("data", 1) if zero and sharded else 1
    accumulated = keys.whole(1, "gradient_accumulation_steps")
    batch = _batch(keys, devices, accumulated)
    microbatches = _microbatches(keys, stages, accumulated, notes)
    if batch % (degrees["data"] * degrees["expert"] * microbatches):
        raise PlanError(
            "P191",
            f"a batch of {batch} does not divide into {microbatches} microbatches on"
            f" {degrees['data'] * degrees['expert']} replicas",
        )
    notes += [f"{key} is left out: {why}" for key, why in LEFT_OUT.items() if _said(keys, key)]
    notes += [*adapters.notes_of(keys), *optimizers.notes_of(keys, "opt_type")]
    if keys.word("", "mu_dtype") == "bfloat16":
        notes.append("mu_dtype bfloat16 is left out: moments are priced in float32")
    recompute, offload = _recompute(keys, notes), _offload(keys)
    if stages > 1 and (offload or offloaded_values(recompute)):
        recompute, offload = saving(saved_names(recompute)), ()
        notes.append("with stages what is offloaded is priced as saved on the devices")
    return (
        Settings(
            batch,
            **degrees,
            microbatches=microbatches,
            zero_stage=zero,
            zero_group=sharing(copies, degrees["data"], devices // stages, domain, notes),
            recompute=recompute,
            offload=offload,
            schedule="gpipe" if stages > 1 else "",
            positions=sizes.get("tensor_sequence", 1) > 1,
            length=keys.whole(0, "max_target_length"),
            precision=precisions.read(NAME, keys, notes),
            styles=(),
            blocks="",
            exchanges=WAITING,
        ).scanned(keys.flag(True, "scan_layers"), notes),
        notes,
    )


def _is_sharded(sizes: Mapping[str, int]) -> bool:
    """Whether parameters are sharded; over the axis data there are copies of them."""
    return max(sizes.get("fsdp", 1), sizes.get("fsdp_transpose", 1)) > 1


def _zero_stage(keys: Keys, sizes: Mapping[str, int], stages: int, notes: list[str]) -> int:
    """The ZeRO stage; 3 with pipeline stages is priced as the highest that GPipe runs."""
    sharded_state = keys.flag(False, "shard_optimizer_over_data")
    sharded = _is_sharded(sizes)
    zero = 3 if sharded else int(sharded_state)
    if stages > 1 and zero == 3:
        zero = MAX_ZERO_STAGE["gpipe"]
        notes.append(f"ZeRO-3 with stages is priced as ZeRO-{zero}")
    return zero


def _microbatches(keys: Keys, stages: int, accumulated: int, notes: list[str]) -> int:
    """Microbatches of a step: accumulated ones, or with stages those of the pipeline's loop."""
    if stages == 1:
        return accumulated
    microbatches = keys.whole(-1, "num_pipeline_microbatches", least=-1)
    microbatches = stages if microbatches == -1 else microbatches
    if accumulated > 1:
        notes.append(
            f"{accumulated} rounds of the pipeline a step are priced as one: their bubbles are"
            " left out"
        )
    repeats = keys.whole(-1, "num_pipeline_repeats", least=-1)
    layers_per_stage = keys.whole(1, "num_layers_per_pipeline_stage")
    if repeats == -1 and (layers := keys.layers()):
        repeats = layers // (stages * layers_per_stage)
    if repeats > 1:
        idle = [(stages - 1) / (r * microbatches + stages - 1) for r in (1, repeats)]
        notes.append(
            f"{repeats} pipeline repeats (circular) are priced as one: {idle[0]:.0%} of the loop's"
            f" time is bubble where it is {idle[1]:.0%}"
        )
    return microbatches * accumulated


def _degrees(keys: Keys, devices: int, domain: int) -> dict[str, int]:
    """Axis of MaxText -> degree, both networks multiplied. One axis of a network may be -1: what is
    left, of all devices where only one is, else of its network's."""
    degrees: dict[str, int] = {}
    unset: list[tuple[str, int]] = []  # an axis that is -1, and what its network leaves it
    for network, size in (("ici", domain), ("dcn", devices // domain)):
        set_product, unset_here = 1, []
        there = {k for k in keys.names() if re.fullmatch(rf"{network}_\w+_parallelism", k)}
        for name in sorted({*there, UNSET[network]}):
            axis = name.removeprefix(f"{network}_").removesuffix("_parallelism")
            n = keys.whole(-1 if name == UNSET[network] else 1, name, least=-1)
            if n == 0:
                raise PlanError("P191", f"{name} = 0")
            if n == -1:
                unset_here.append(axis)
            else:
                degrees[axis] = degrees.get(axis, 1) * n
                set_product *= n
        if len(unset_here) > 1:
            raise PlanError(
                "P191",
                f"{' and '.join(f'{network}_{k}_parallelism' for k in unset_here)} are both -1",
                help=["one axis of a network takes what is left"],
            )
        remaining = size // set_product if size % set_product == 0 else 0
        unset += [(axis, remaining) for axis in unset_here]
    remaining, rest = divmod(devices, prod(degrees.values()))
    if len(unset) == 1:
        unset = [(unset[0][0], remaining)]
    if rest or remaining != prod(n for _, n in unset):
        raise PlanError(
            "P191",
            f"degrees {degrees} do not multiply to {devices} devices, {domain} of them on fast"
            " links",
            help=["--devices as many as the configuration runs on"],
        )
    for axis, n in unset:
        degrees[axis] = degrees.get(axis, 1) * n
    return degrees


def _batch(keys: Keys, devices: int, steps: int) -> int:
    value = keys.get("per_device_batch_size")
    value = 12.0 if value is None else value
    rows = (
        float(value) * devices * steps
        if isinstance(value, int | float) and not isinstance(value, bool)
        else -1.0
    )
    if rows < 1 or abs(rows - round(rows)) > 1e-6 * rows:
        raise PlanError(
            "P191", f"per_device_batch_size = {value!r} makes {rows:g} rows on {devices} devices"
        )
    return round(rows)
