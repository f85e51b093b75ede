"""Hugging Face transformers and accelerate: a tensor-parallel plan per module, and the degrees and
arguments of the Trainer, as JSON; accelerate's configuration as YAML, which has no rows.

    tp_plan                                      module pattern -> colwise, rowwise,
                                                 colwise_gather_output (a head), embedding_rowwise
                                                 (a vocabulary)
    tp_size, cp_size, dp_replicate_size, dp_shard_size     tensor, sequence, data at ZeRO stage 0,
                                                           data at ZeRO stages 2 and 3
    per_device_train_batch_size, gradient_accumulation_steps, gradient_checkpointing,
    fsdp_config.reshard_after_forward
    parallelism_config_tp_size, ..., fsdp_reshard_after_forward,           the same in accelerate's
    fsdp_activation_checkpointing, fsdp_sharding_strategy (FSDP 1),        file; DeepSpeed's
    zero_stage                                                             stage, whose own keys
                                                                           planner.interop.deepspeed
                                                                           has in these words

The styles are read from the layouts of the plan that is priced last: a weight whose cut dim is
summed over is rowwise, one whose cut dim its result has colwise. A file is priced under its styles:
modules that it does not name are whole. What the planner takes each style for is in CUTS. Source:
docs/source/en/tensor_parallelism.md of huggingface/transformers and the `base_model_tp_plan` of its
configurations; src/accelerate/parallelism_config.py, commands/config and
examples/torch_native_parallelism/configs of huggingface/accelerate, 16cb6eb (July 2026).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from planner.analysis.axis_roles import role_named
from planner.errors import PlanError, did_you_mean
from planner.interop import adapters, model_sizes, optimizers, precisions
from planner.interop.keys import Keys
from planner.interop.model_sizes import Claim, claims_of
from planner.interop.settings import Facts, Rounds, Settings, sharing
from planner.ops import operator_of
from planner.strategy.strategy import Strategy

if TYPE_CHECKING:
    from planner.analysis.facts import GraphFacts

NAME, SUFFIX = "hf", ".json"
MARKS = (
    r"(base_model_)?tp_plan|per_device_train_batch_size|(parallelism_config_)?dp_(replicate|shard)_size"
    r"|parallelism_config_\w+|distributed_type|fsdp_(version|sharding_strategy)"
)
COLUMNS, ROWS, VOCABULARY, WHOLE = "colwise", "rowwise", "embedding_rowwise", "replicate"
HEAD = "colwise_gather_output"
CUTS = {
    COLUMNS: COLUMNS,
    "colwise_rep": COLUMNS,
    HEAD: COLUMNS,
    ROWS: ROWS,
    "rowwise_rep": ROWS,
    VOCABULARY: ROWS,
    WHOLE: WHOLE,
}
"""Style -> which dim of a weight is cut: a product's columns, what it sums over (of a table its
rows), or none. Whether results are gathered follows from what reads them."""
PLANS = ("tp_plan", "base_model_tp_plan")
ZERO_OF_RESHARD = {True: 3, False: 2}
"""reshard_after_forward -> ZeRO stage."""
STRATEGIES = {
    "full_shard": 3,
    "shard_grad_op": 2,
    "no_shard": 0,
    "hybrid_shard": 3,
    "hybrid_shard_zero2": 2,
    "1": 3,
    "2": 2,
    "3": 0,
    "4": 3,
    "5": 2,
}
"""fsdp_sharding_strategy of FSDP 1, by name and by number -> ZeRO stage."""
FSDP = (
    "fsdp_version",
    "reshard_after_forward",
    "fsdp_reshard_after_forward",
    "fsdp_sharding_strategy",
)
RECOMPUTE = (
    "gradient_checkpointing",
    "fsdp_activation_checkpointing",
    "activation_checkpointing",
    "xla_fsdp_grad_ckpt",
)
"""Flags of which one turns recompute on."""
LEFT_OUT = {
    "zero_hpz_partition_size": "weights are gathered from all replicas",
    "zero_quantized_weights": "weights are sent in 16 bits",
    "zero_quantized_gradients": "gradients are sent in 16 bits",
    "load_in_4bit": "weights are priced in 16 bits",
    "load_in_8bit": "weights are priced in 16 bits",
    "quantization_bit": "weights are priced in 16 bits",
    "use_liger_kernel": "logits are priced as the model has them",
}
"""Keys that change the program and have no price here, and what is priced instead."""
SIZES = {
    model_sizes.LAYERS: ("num_hidden_layers",),
    model_sizes.HIDDEN: ("hidden_size",),
    model_sizes.HEADS: ("num_attention_heads",),
    model_sizes.GROUPS: ("num_key_value_heads",),
    model_sizes.INNER: ("intermediate_size",),
    model_sizes.VOCABULARY: ("vocab_size",),
}


def round_off(rounds: Rounds, facts: Facts) -> list[str]:
    """Rounds settings to what transformers can express; returns what it cannot and what has no
    price."""
    rounds.unstaged()
    rounds.together("experts are not cut apart: data parallel instead")
    rounds.usual("transformers")
    if rounds.now.zero_stage == 1:
        rounds.to("sharded ranks scatter gradients too: ZeRO-2", zero_stage=2)
    if rounds.now.zero_stage == 0 and rounds.now.sequence > 1:
        rounds.to("context ranks shard parameters: ZeRO-2", zero_stage=2)
    rounds.to("tensor parallelism leaves positions whole", positions=False)
    length, rounds.now = rounds.now.length, replace(rounds.now, length=0)
    return [f"rows of {length:,} tokens: the data decides that"] if length else []


def write(s: Settings, facts: Facts) -> str:
    """The settings as one JSON table."""
    table: dict[str, Any] = {
        "distributed_config": {"tp_size": s.tensor},
        "tp_plan": dict(s.styles),
        "parallelism_config": {
            "dp_replicate_size": s.copies if s.zero_stage else s.data,
            "dp_shard_size": s.data // s.copies if s.zero_stage else 1,
            "cp_size": s.sequence,
            "tp_size": s.tensor,
        },
        "training_arguments": {
            "per_device_train_batch_size": s.rows,
            "gradient_accumulation_steps": s.microbatches,
            "gradient_checkpointing": s.recompute == "block",
            **_flags(s.precision),
        },
    }
    if s.zero_stage:
        table["training_arguments"]["fsdp_config"] = {
            "fsdp_version": 2,
            "reshard_after_forward": s.zero_stage == 3,
        }
    return json.dumps(table, indent=2) + "\n"


def _flags(precision: str) -> dict[str, bool]:
    """TrainingArguments' flags of a recipe. Raises PlanError P192 for one that they have none
    for."""
    known = {"": {}, "bf16-mixed": {"bf16": True}, "fp16": {"fp16": True}, "fp32": {"bf16": False}}
    if precision not in known:
        raise PlanError(
            "P192",
            f"TrainingArguments have no flag for the precision {precision}",
            help=["-o FILE.yaml writes a configuration of accelerate"],
        )
    return known[precision]


def behind(s: Settings) -> list[str]:
    """What goes behind a configuration of accelerate: rows, microbatches and recompute are the
    program's."""
    return [
        f"per_device_train_batch_size={s.rows}",
        f"gradient_accumulation_steps={s.microbatches}",
        f"gradient_checkpointing={str(s.recompute == 'block').lower()}",
    ]


def write_accelerate(s: Settings, facts: Facts) -> str:
    """The settings as a configuration of `accelerate launch`; rows and microbatches are the
    program's, and stand in its first line as they go behind the file in `plan import`. Raises
    PlanError P192 for replicas beside tensor ranks that shard nothing."""
    if s.data > 1 and not s.zero_stage and s.tensor * s.sequence > 1:
        raise PlanError(
            "P192",
            "accelerate has no replicas that shard nothing beside tensor or context ranks",
            help=["--pin zero=2, or zero=3"],
        )
    sharded = bool(s.zero_stage)
    sizes = {"dp_replicate": s.copies, "dp_shard": s.data // s.copies if sharded else 1}
    sizes |= {"cp": s.sequence, "tp": s.tensor}
    lines = [
        f"# {facts.model} on {s.devices} devices. The program's: " + " ".join(behind(s)),
        f"distributed_type: {'FSDP' if sharded else 'MULTI_GPU'}",
        f"num_processes: {s.devices}",
        *(f"{k}: '{v}'" for k, v in precisions.words(NAME, s.precision).items()),
    ]
    if sharded or s.tensor > 1:
        lines += ["parallelism_config:"]
        lines += [f"  parallelism_config_{name}_size: {n}" for name, n in sizes.items()]
    if sharded:
        lines += [
            "fsdp_config:",
            "  fsdp_version: 2",
            f"  fsdp_reshard_after_forward: {str(s.zero_stage == 3).lower()}",
        ]
    return "\n".join(lines) + "\n"


FORMS = {".yaml": write_accelerate, ".yml": write_accelerate}
"""How a file ends -> what writes it; any other is JSON."""
BEHIND = {".yaml": behind, ".yml": behind}
"""How a file ends -> what goes behind it."""
OFFLOADS = ("fsdp_offload_params", "offload_optimizer_device", "offload_param_device")
KIND_KEYS = {"distributed_type": ("zero_stage", *OFFLOADS)}
"""The key that says which others accelerate looks at, and those of its kinds."""


def claims(keys: Keys) -> tuple[Claim, ...]:
    """The sizes of the model that a configuration of it says. Raises PlanError P191."""
    return claims_of(keys, SIZES)


def read(keys: Keys, devices: int, domain: int) -> tuple[Settings, list[str]]:
    """Settings of a configuration and what it says beyond them. Raises PlanError P191 where keys
    contradict each other."""
    notes: list[str] = []
    styles, auto = _tp_plan(keys)
    kind, zero = _kind(keys), _zero_stage(keys)
    asked = bool(styles or auto)
    replicate, shard, cp, tp = _sizes(keys, devices, asked, kind == "fsdp" and zero > 0, notes)
    hybrid = any(
        word.startswith("hybrid") or word in ("4", "5")
        for word in (keys.word("", "fsdp_sharding_strategy"), *_fsdp_words(keys))
    )
    if hybrid and replicate == 1 and shard % (nodes := max(1, devices // domain)) == 0:
        replicate, shard = nodes, shard // nodes  # a node's devices share a copy
    if tp > 1 and not styles:
        notes.append(
            "no tp_plan by module: weights are cut as it costs least"
            + (", not as the library's plan of the model says" if auto else "")
        )
    if styles and tp == 1:
        notes.append("the tp_plan says nothing where tp_size is 1")
    data = replicate * shard
    # A device holds all parameters unless FSDP shards them, over the context ranks too.
    fsdp = kind == "fsdp" or any(name in keys for name in FSDP)
    keys.whole(2, "fsdp_version")
    if kind == "deepspeed":
        zero = keys.whole(2, "zero_stage", least=0)
    elif shard == 1 and not (cp > 1 and fsdp):
        zero = 0
    copies = replicate if zero and kind != "deepspeed" else 1
    if (
        zero == 3
        and data % (among := max(keys.whole(0, "mics_shard_size", least=-1), 0) or data) == 0
    ):
        copies = max(copies, data // among)
    rows, microbatches = _rows(keys, data)
    recompute = [name for name in RECOMPUTE if keys.flag_anywhere(name)]
    notes += _left_out(keys)
    return (
        Settings(
            rows * data * microbatches,
            data=data,
            sequence=cp,
            tensor=tp,
            microbatches=microbatches,
            zero_stage=zero,
            zero_group=sharing(copies, data, devices, domain, notes),
            recompute="block" if recompute else "none",
            styles=styles if tp > 1 else (),
            precision=precisions.read(NAME, keys, notes),
        ),
        notes,
    )


def _left_out(keys: Keys) -> list[str]:
    """Notes on keys that change the program and have no price."""
    host = [name for name in OFFLOADS if keys.word("none", name) not in ("none", "false")]
    host += ["fsdp offload"] if "offload" in _fsdp_words(keys) else []
    return [
        *adapters.notes_of(keys),
        *optimizers.notes_of(keys, "optim", "optimizer.type"),
        *(f"{name} is left out: nothing is priced in the host's memory" for name in host),
        *(f"{name} is left out: {why}" for name, why in LEFT_OUT.items() if _on(keys.some(name))),
    ]


def _sizes(
    keys: Keys, devices: int, cut: bool, sharded: bool, notes: list[str]
) -> tuple[int, int, int, int]:
    """(replicas, shards, context ranks, tensor ranks). cut: there is a tp_plan; sharded: what no
    size speaks of is sharded. Raises PlanError P191."""
    cp = keys.whole(1, "cp_size", "parallelism_config_cp_size")
    sp = keys.whole(1, "sp_size", "parallelism_config_sp_size")
    if sp > 1:
        notes.append("sequence ranks of DeepSpeed (Ulysses) are priced as context ranks")
    cp *= sp
    replicate = keys.whole(0, "dp_replicate_size", "parallelism_config_dp_replicate_size")
    shard = keys.whole(0, "dp_shard_size", "parallelism_config_dp_shard_size")
    tp = keys.whole(0, "tp_size", "parallelism_config_tp_size") or (
        max(1, devices // ((replicate or 1) * (shard or 1) * cp)) if cut else 1
    )
    if not replicate and not shard:
        rest = max(1, devices // (tp * cp))
        # processes that no size speaks of are replicas, or shards under FSDP
        replicate, shard = (1, rest) if sharded else (rest, 1)
    replicate, shard = replicate or 1, shard or 1
    if replicate * shard * cp * tp != devices:
        raise PlanError(
            "P191",
            f"replicate {replicate} x shard {shard} x context {cp} x tensor {tp} is not {devices}"
            " devices",
            help=["--devices as many as the configuration runs on"],
        )
    return replicate, shard, cp, tp


def _rows(keys: Keys, replicas: int) -> tuple[int, int]:
    """(rows of a device, microbatches). Raises PlanError P191 where accelerate's file is alone and
    has none, or where they do not make the batch that DeepSpeed's says."""
    batch = keys.whole(0, "train_batch_size")
    rows = keys.whole(0, "per_device_train_batch_size")
    microbatches = keys.whole(0, "gradient_accumulation_steps")
    accelerate = any(k == "distributed_type" or k.startswith("parallelism_") for k in keys.names())
    deepspeed = "zero_stage" in keys and not any(k.startswith("deepspeed_") for k in keys.names())
    if batch and rows:
        microbatches = microbatches or batch // (rows * replicas)
    elif batch:
        microbatches = microbatches or 1
        rows = batch // (microbatches * replicas)
    elif accelerate and not rows:
        raise PlanError(
            "P191",
            "train_micro_batch_size_per_gpu is missing, or left to the program"
            if deepspeed
            else "per_device_train_batch_size is missing: rows are the program's, not accelerate's",
            help=["per_device_train_batch_size=N behind the file"],
        )
    rows, microbatches = rows or 8, microbatches or 1
    whole = max(1, batch // (rows * microbatches))
    if batch and rows * microbatches * replicas != batch:
        raise PlanError(
            "P191",
            f"train_batch_size {batch} is not {rows} rows x {microbatches} microbatches x"
            f" {replicas} devices",
            help=[
                f"--devices {whole}" if whole * rows * microbatches == batch else "another value"
            ],
        )
    return rows, microbatches


def _on(value: object) -> bool:
    """Whether a value turns something on: sizes from 2, words, true."""
    return value is True or value not in (None, False, 0, 1, "", "none")


def _fsdp_words(keys: Keys) -> list[str]:
    """What `fsdp` of TrainingArguments says: a text of words, a list of them, or true."""
    value = keys.get("fsdp")
    if value is True or str(value).lower() == "true":
        return ["full_shard"]
    words = value if isinstance(value, list | tuple) else str(value or "").split()
    return [w for word in words if (w := str(word).lower()) not in ("false", "none")]


def _kind(keys: Keys) -> str:
    """What shares parameters out: accelerate's distributed_type, or fsdp where TrainingArguments
    ask for it. Raises PlanError P191 for a kind whose degrees are not read."""
    kind = keys.word("", "distributed_type")
    if kind == "megatron_lm":
        raise PlanError(
            "P191",
            "distributed_type MEGATRON_LM: megatron_lm_config is not read",
            help=["its degrees as a list of Megatron's arguments in FILE.args (docs/exchange.md)"],
        )
    return kind or ("fsdp" if _fsdp_words(keys) else "")


def _zero_stage(keys: Keys) -> int:
    """The ZeRO stage of sharded ranks. Raises PlanError P191."""
    word = keys.word("", "fsdp_sharding_strategy")
    word = word or next((w for w in _fsdp_words(keys) if w in STRATEGIES), "")
    if word and word not in STRATEGIES:
        raise PlanError(
            "P191",
            f"fsdp_sharding_strategy = {word!r}",
            help=[f"one of {', '.join(w.upper() for w in STRATEGIES)}"],
        )
    if word:
        return STRATEGIES[word]
    again = keys.word("", "fsdp_reshard_after_forward")
    if again in STRATEGIES:  # FSDP 1 has its strategy there
        return STRATEGIES[again]
    return ZERO_OF_RESHARD[keys.flag(True, "reshard_after_forward", "fsdp_reshard_after_forward")]


def _tp_plan(keys: Keys) -> tuple[tuple[tuple[str, str], ...], bool]:
    """(pattern and style of each module that is named, whether the library is to choose)."""
    plan = keys.get(*PLANS)
    if plan is None or plan == "auto":
        return (), plan == "auto"
    if not isinstance(plan, Mapping):
        raise PlanError(
            "P191",
            f"tp_plan is {type(plan).__name__} {str(plan)[:40]!r}",
            help=['"auto", or a table of modules: {"model.layers.*.mlp.up_proj": "colwise"}'],
        )
    for pattern, style in plan.items():
        if not isinstance(style, str) or style not in CUTS:
            suggestion = did_you_mean(str(style), list(CUTS))
            raise PlanError(
                "P191",
                f"tp_plan: {pattern!r} has the style {str(style)[:40]!r}, which the planner has no"
                " layout for",
                help=[h for h in (suggestion, f"styles: {', '.join(CUTS)}") if h],
            )
    return tuple((str(k), str(v)) for k, v in plan.items()), False


def node_pins(styles: Iterable[tuple[str, str]], base: GraphFacts) -> dict[str, dict[str, Any]]:
    """Pins of the products and tables that a plan by module decides: what it names is cut by
    "tensor" so, all other weights of products and tables are whole.

    Raises PlanError P191: a pattern that is no module of the model, a style that its operator has
    no dim for, layers that are alike and cut differently.
    """
    graph, wanted = base.graph, list(styles)
    pins: dict[int, dict[str, Any]] = {}
    matched: set[str] = set()
    forms = [
        (re.compile(r"(?:.*\.)?" + re.escape(p).replace(r"\*", r"\d+"), re.S), p, s)
        for p, s in wanted
    ]
    modules = {
        name: module
        for name in graph.weights
        for module, _, leaf in [graph.labels.get(name, name).rpartition(".")]
        if leaf == "weight"
    }
    for name, module in modules.items():
        pattern, style = next(
            ((p, s) for form, p, s in forms if form.fullmatch(module)), ("", WHOLE)
        )
        matched.add(pattern)
        i, slot = graph.consumers[name][0]
        pin = _weight_pin(base, i, slot, style, f"tp_plan: {pattern!r} is {style}, and {module!r}")
        if pin is not None and pins.setdefault(base.shared[i], pin) != pin:
            raise PlanError(
                "P191",
                f"tp_plan: {module!r} is {style}, and a layer that is alike is not",
                help=["one pattern with * for all layers"],
            )
    unknown = next((p for p, s in wanted if p not in matched and CUTS[s] != WHOLE), "")
    if unknown:
        suggestion = did_you_mean(
            unknown, list(dict.fromkeys(starred(m) for m in modules.values()))
        )
        raise PlanError(
            "P191",
            f"tp_plan: {unknown!r} is no module of the model",
            help=[h for h in (suggestion, "plan ops MODEL --parameters lists its parameters") if h],
        )
    return {graph.nodes[i].id: pin for i, pin in pins.items()}


def _weight_pin(
    base: GraphFacts, i: int, slot: int, style: str, what: str
) -> dict[str, Any] | None:
    """The pin of node i that cuts its operand in `slot` by a style; None for an operator that has
    no such pin and a style that cuts nothing. Raises PlanError P191, which begins with `what`."""
    op, dims = base.graph.nodes[i].op, base.rules[i].operands[slot]
    kind = operator_of(op).kind
    if kind not in ("product", "lookup") or not all(dims):
        if CUTS[style] == WHOLE:
            return None
        raise PlanError(
            "P191", f"{what} is read by {op}: no product", help=["leave it out: it is whole then"]
        )
    if kind == "lookup" and CUTS[style] == COLUMNS:
        raise PlanError("P191", f"{what} is a table", help=[f"{VOCABULARY}, or leave it out"])
    in_result = {dim[0]: any(dim[0] in r for r in base.rules[i].results[0]) for dim in dims}
    return {
        "split": {
            factor: ["tensor"] if CUTS[style] == (COLUMNS if stays else ROWS) else []
            for factor, stays in in_result.items()
        }
    }


def starred(module: str) -> str:
    """A module's name with its layer numbers as patterns have them."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module)


def styles_of(strategy: Strategy, base: GraphFacts) -> tuple[tuple[str, str], ...]:
    """Module pattern and style of the weights that "tensor" cuts; layer numbers starred, in the
    order of the graph."""
    graph, styles = base.graph, dict[str, str]()
    for name in graph.weights:
        row = strategy.tensors.get(name)
        cut = (
            [
                d
                for d, axes in enumerate(row["layout"])
                if any(role_named(a) == "tensor" for a in axes)
            ]
            if row
            else []
        )
        label = graph.labels.get(name, name)
        module, _, leaf = label.rpartition(".")
        if not cut or leaf != "weight":
            continue
        i, slot = graph.consumers[name][0]
        node, rule = graph.nodes[i], base.rules[i]
        factor = rule.operands[slot][cut[0]][0]
        in_result = any(factor in dim for dim in rule.results[0])
        if operator_of(node.op).kind == "lookup":
            style = VOCABULARY if cut[0] == 0 else ""
        elif operator_of(node.op).kind == "product":
            style = ROWS if not in_result else HEAD if i not in base.repeated else COLUMNS
        else:
            style = ""
        if style:
            styles.setdefault(starred(module), style)
    return tuple(styles.items())
