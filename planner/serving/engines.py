"""A serving plan as arguments of vLLM and SGLang.

Both cut weights by tensor parallelism as it is written by hand and run replicas of that, so what
they can say of a plan is one of its rows `tp=N`, or of a mixture `ep=M tp=N`, whose replicas share
the experts: the best for the plan's objective whose replicas lie in a node. Names of arguments:
vllm/engine/arg_utils.py of vLLM (`vllm serve --help`), and python/sglang/srt/server_args.py of
SGLang (`python3 -m sglang.launch_server --help`). Sequences and tokens of a pass are those of a
replica there; SGLang divides them by the replicas that share experts. vLLM's replicas of a mixture
always share them (docs/serving/data_parallel_deployment.md there).

Both engines join sequences to those that generate, and page the cache. Plans for requests that
arrive are priced so; prices of others are those of the emitted program, which does neither. Plans
for an engine (`--for`) are priced with its exchanges of experts' rows, and say so to it:
docs/serving/expert_parallel_deployment.md and docs/design/dbo.md of vLLM, server_args.py of SGLang.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

from costmodels.hardware.units import show_bytes, show_time
from planner.errors import PlanError
from planner.launch.job import node_slots
from planner.ops import operator_of
from planner.serving.result import Serving, arriving, pools_of, rate_words, together_words

DEAR = 0.05
"""Worse than the plan by more is refused."""

KV_TRANSFER = '\'{"kv_connector":"NixlConnector","kv_role":"ROLE"}\''
"""How vLLM passes caches on (docs/features/nixl_connector_usage.md there)."""
ROLES = ("prefill", "decode")
BY_HAND = re.compile(r"(ep=\d+ )?tp=\d+")
NODES = ": ${HEAD:?address of the first node} ${NODE:?number of this node, 0 for the first}\n"
HEADS = frozenset({"g", "r", "h"})
"""Factors of query heads: groups and heads of a group; of attention to latents all."""
HEADLESS = '((NODE == 0)) || set -- --headless "$@"\n'
"""Nodes but the first have no server of their own."""
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "bfloat16"}
"""How a precision begins -> what both engines call it; of fp8, what lies between products."""


@dataclass(frozen=True)
class Service:
    """What an engine is told. tensor: devices of a replica; replicas: of one node; nodes: that run
    the same; sequences, tokens: at once, and of a pass over prompts, in a replica; length: tokens
    of a sequence; dtype: of weights and arithmetic."""

    tensor: int
    replicas: int
    nodes: int
    sequences: int
    tokens: int
    length: int
    dtype: str
    fp8_cache: bool = False
    role: str = ""
    """prefill or decode, of replicas that do one of both"""
    shared: bool = False
    """Whether all replicas share the experts"""
    fp8: bool = False
    """Whether weights are kept in float8, and rows made so"""
    states: bool = False
    """Whether linear attention keeps states, which plans have in float32"""
    priced: bool = False
    """Whether the plan is priced as of engines: rows travel by DeepEP, halves of a batch take
    turns"""

    @property
    def together(self) -> int:
        """Replicas that share experts, of all nodes; 1 where none does."""
        return self.replicas * self.nodes if self.shared else 1


def vllm(s: Service) -> list[str]:
    """Words of `vllm serve`."""
    words = ["vllm", "serve", '"$MODEL"', "--tensor-parallel-size", str(s.tensor)]
    replicas = max(s.replicas, s.together)
    words += ["--data-parallel-size", str(replicas)] if replicas > 1 else []
    words += ["--enable-expert-parallel"] if s.shared else []
    if s.shared and s.priced:
        prompts_alone = s.role == "prefill"
        kernels = "deepep_high_throughput" if prompts_alone else "deepep_low_latency"
        words += ["--all2all-backend", kernels, "--enable-dbo"]
    if s.shared and s.nodes > 1:
        words += ["--data-parallel-size-local", str(s.replicas)]
        words += ["--data-parallel-start-rank", f'"$((NODE * {s.replicas}))"']
        words += ["--data-parallel-address", '"$HEAD"', "--data-parallel-rpc-port", "13345"]
    words += ["--dtype", s.dtype, "--max-model-len", str(s.length)]
    words += ["--max-num-seqs", str(s.sequences)]
    words += ["--quantization", "fp8"] if s.fp8 else []
    words += ["--kv-cache-dtype", "fp8"] if s.fp8_cache else []
    words += ["--mamba-ssm-cache-dtype", "float32"] if s.states else []
    # vLLM asks for a token of every sequence in a pass.
    words += ["--max-num-batched-tokens", str(max(s.tokens, s.sequences))]
    if not s.role:
        return words
    kind = {"prefill": "kv_producer", "decode": "kv_consumer"}[s.role]
    return [*words, "--kv-transfer-config", KV_TRANSFER.replace("ROLE", kind)]


def sglang(s: Service) -> list[str]:
    """Words of SGLang's server."""
    words = ["python3", "-m", "sglang.launch_server", "--model-path", '"$MODEL"']
    words += ["--tp-size", str(s.tensor * s.together)]
    replicas = max(s.replicas, s.together)
    words += ["--dp-size", str(replicas)] if replicas > 1 else []
    if s.shared:
        words += ["--enable-dp-attention", "--ep-size", str(s.tensor * s.together)]
    if s.shared and s.priced:
        words += ["--moe-a2a-backend", "deepep", "--enable-two-batch-overlap"]
    if s.shared and s.nodes > 1:
        words += ["--nnodes", str(s.nodes), "--node-rank", '"$NODE"']
        words += ["--dist-init-addr", '"$HEAD:5000"']
    words += ["--dtype", s.dtype, "--context-length", str(s.length)]
    words += ["--max-running-requests", str(s.sequences * s.together)]
    words += ["--quantization", "fp8"] if s.fp8 else []
    words += ["--kv-cache-dtype", "fp8_e4m3"] if s.fp8_cache else []
    words += ["--mamba-ssm-dtype", "float32"] if s.states else []
    words += ["--chunked-prefill-size", str(s.tokens * s.together)]
    return [*words, "--disaggregation-mode", s.role] if s.role else words


ENGINES: Mapping[str, Callable[[Service], list[str]]] = {"vllm": vllm, "sglang": sglang}
"""Name -> the words that start it."""


@dataclass(frozen=True)
class Handover:
    """A script that starts an engine, and a line that says what is rounded."""

    text: str
    cost: str


def hand_over(serving: Serving, to: str) -> Handover:
    """A serving plan as an engine's script; to: of ENGINES.

    Raises PlanError: P192 for what engines have no argument for, P194 where no tensor parallelism
    in a node fits, or all is over a twentieth worse than the plan.
    """
    engine = serving.shape.engine
    if engine not in ("", to):
        raise PlanError(
            "P192",
            f"this plan is priced as {engine} serves, and {to} serves otherwise",
            help=[f"--to {engine}", f"plan again with --for {to}"],
        )
    row = _nearest(serving, to)
    if "units" in row:
        return _hand_over_pools(serving, to, row)
    loss = _loss(serving, row)
    kept = f"{row['label']}, {row['replicas']} replica{'s' * (row['replicas'] > 1)}"
    figures = f"{_figures(serving, row)}, {show_bytes(row['memory_bytes'])} a device"
    worse = f"{100 * loss:.1f} % worse than the plan" if loss > 0 else "as good as the plan"
    cost = f"{to}: {kept}: {figures}; {worse} by its objective"
    service = service_of(serving, row)
    where, body = "", f'{_command(ENGINES[to](service))} "$@"\n'
    if service.nodes > 1 and service.shared:
        where = (
            f"# On each of {service.nodes} nodes, with HEAD, the address of the first, and NODE,\n"
            "# the node's number, 0 for the first.\n"
        )
        body = f"{NODES}{HEADLESS * (to == 'vllm')}{body}"
    elif service.nodes > 1:
        where = f"# The same on each of {service.nodes} nodes; a balancer in front of them.\n"
    return Handover(_script(serving, where, body), cost)


def _hand_over_pools(serving: Serving, to: str, row: Mapping[str, Any]) -> Handover:
    """A script that starts a replica of either kind. Raises PlanError P192."""
    pools, dtype, loss = row["units"], _dtype(serving), _loss(serving, row)
    worse = f"{100 * loss:.1f} % worse than the plan" if loss > 0 else "as good as the plan"
    parts, counts = [], []
    for role in ROLES:
        pool = pools[role]
        service = Service(
            tensor=int(pool["split"]),
            replicas=1,
            nodes=1,
            sequences=int(pool["sequences"]),
            tokens=int(pool["step_tokens"]),
            length=int(serving.traffic["longest"]),  # type: ignore[index]
            dtype=dtype,
            fp8_cache=serving.shape.cache_type == "fp8",
            fp8=serving.shape.quantize == "fp8",
            states=_keeps_states(serving),
            role=role,
        )
        parts.append(f'  {role}) shift; {_command(ENGINES[to](service), indent=4)} "$@" ;;\n')
        devices = f"{pool['split']} device{'s' * (pool['split'] > 1)} each"
        counts.append(f"{int(pool['replicas'])} of {role} on {devices}")
    where = (
        f"# {' and '.join(counts)}: bash FILE prefill --port 8000, bash FILE decode --port 8001,\n"
        "# with CUDA_VISIBLE_DEVICES of each; a proxy that knows both kinds in front of them.\n"
    )
    body = f"case ${{1:?prefill or decode}} in\n{''.join(parts)}"
    body += '  *) echo "prefill or decode" >&2; exit 2 ;;\nesac\n'
    cost = f"{to}: {', '.join(counts)}: {_figures(serving, row)}; {worse} by its objective"
    return Handover(_script(serving, where, body), cost)


def _figures(serving: Serving, row: Mapping[str, Any]) -> str:
    """What a row does, in words."""
    if serving.traffic is None:
        speed = f"{row['tokens_per_s_per_device']:,.0f} tokens/s/device"
        return f"{speed}, ttft {show_time(row['ttft_s'])}, tpot {show_time(row['tpot_s'])}"
    late = (f"{name} {show_time(row[f'{name}_p99_s'])}" for name in ("ttft", "tpot"))
    return (
        f"{rate_words(row['most_per_s'])} requests/s at most, {', '.join(late)} of 99 in a hundred"
    )


def service_of(serving: Serving, row: Mapping[str, Any]) -> Service:
    """What an engine is told of a row of a plan. Raises PlanError P192."""
    shape, strategy, dtype = serving.shape, serving.step, _dtype(serving)
    replicas, split = int(row["replicas"]), int(row["split"])
    a_node = min(replicas, max(1, node_slots(strategy) // split))
    if replicas % a_node:
        raise PlanError(
            "P192",
            f"{replicas} replicas of {split} devices do not fill nodes alike",
            help=["plan for whole nodes"],
        )
    traffic = serving.traffic
    wave = -(-int(row["wave"]) // replicas) * shape.prompt
    return Service(
        tensor=split,
        replicas=a_node,
        nodes=replicas // a_node,
        sequences=-(-shape.concurrency // replicas),
        tokens=int(traffic["limits"]["step_tokens"]) if traffic else wave,
        length=int(traffic["longest"]) if traffic else shape.length,
        dtype=dtype,
        fp8_cache=shape.cache_type == "fp8",
        shared=str(row["label"]).startswith("ep="),
        fp8=shape.quantize == "fp8",
        states=_keeps_states(serving),
        priced=bool(shape.engine),
    )


def _keeps_states(serving: Serving) -> bool:
    """Whether a plan's model has linear attention: its states have heads, keys and values."""
    return any(
        str(row.get("label", "")).startswith("state.") and len(row["shape"]) == 4
        for row in serving.step.tensors.values()
    )


def _dtype(serving: Serving) -> str:
    """How engines call the precision. Raises PlanError P192 for one that they have no word for."""
    quantize, precision = serving.shape.quantize, str(serving.step.workload["precision"])
    dtype = next((t for begin, t in DTYPES.items() if precision.startswith(begin)), "")
    if quantize not in ("none", "fp8") or not dtype:
        what = f"--quantize {quantize}" if dtype else f"precision {precision}"
        raise PlanError(
            "P192",
            f"no engine has an argument for {what}: a checkpoint says how it is quantised",
            help=["plan without --quantize, or plan emit: the program quantises itself"],
        )
    return dtype


def _nearest(serving: Serving, to: str) -> Mapping[str, Any]:
    """The row that an engine can say and that is best for the plan's objective."""
    node, heads = node_slots(serving.step), _query_heads(serving)
    apart = to != "vllm" or not _is_mixture(serving)
    rows = [
        row
        for row in serving.rows
        if _by_hand(row)
        and row["fits"]
        and int(row["split"]) <= node
        and all(heads % split == 0 for split in _splits(row))
        and (apart or "units" in row or row["replicas"] == 1 or str(row["label"]).startswith("ep="))
    ]
    best = min(rows, key=lambda row: _loss(serving, row), default=None)
    if best is None:
        why = (
            f"no tensor parallelism in a node fits that divides the query heads, which is what {to}"
            " can say of this plan"
        )
    elif (loss := _loss(serving, best)) > DEAR:
        why = (
            f"the best that {to} can say of this plan, {best['label']}, is {100 * loss:.1f} % worse"
        )
    else:
        return best
    raise PlanError(
        "P194",
        why,
        help=[
            "plan without --pools"
            if pools_of(serving)
            else "plan emit writes the program of this plan",
            "plan show lists the rows tp=N",
        ],
    )


def _query_heads(serving: Serving) -> int:
    """What number of devices all attentions' query heads divide over, as engines ask; 0 without
    attention, or where the file does not say."""
    details = serving.step.details
    sizes = (
        details[name]["sizes"]
        for name, row in serving.step.nodes.items()
        if operator_of(row["op"]).kind == "attention" and name in details
    )
    counts = (prod(int(s[f]) for f in HEADS if f in s) for s in sizes if HEADS & s.keys())
    return gcd(*counts)


def _splits(row: Mapping[str, Any]) -> list[int]:
    """Devices of a replica, of both kinds where they are apart."""
    units = row.get("units")
    return [int(units[k]["split"]) for k in ROLES] if units else [int(row["split"])]


def _by_hand(row: Mapping[str, Any]) -> bool:
    """Whether a row is tensor parallelism by hand, of replicas that do both, and may share experts,
    or of both kinds."""
    units = row.get("units")
    if units is None:
        return bool(BY_HAND.fullmatch(str(row["label"])))
    return all(units[k]["label"] == f"tp={units[k]['split']}" for k in ROLES)


def _is_mixture(serving: Serving) -> bool:
    """Whether a plan's model has routed experts."""
    return any(operator_of(node["op"]).kind == "experts" for node in serving.step.nodes.values())


def _loss(serving: Serving, row: Mapping[str, Any]) -> float:
    """The share by which a row is worse than the plan in what was sought."""
    figures, aim = serving.figures, serving.service["objective"]
    if serving.traffic:
        plan = next(r for r in serving.rows if r["chosen"])
        if aim == "throughput":
            return float(plan["most_per_s"] / row["most_per_s"] - 1)
        return float(row[f"{aim}_p99_s"] / plan[f"{aim}_p99_s"] - 1)
    if aim == "throughput":
        return float(figures["tokens_per_s_per_device"] / row["tokens_per_s_per_device"] - 1)
    return float(row[f"{aim}_s"] / figures[f"{aim}_s"] - 1)


def _command(words: list[str], indent: int = 2) -> str:
    """The words that replace the shell, an option a line."""
    lines = [""]
    for word in words:
        joined = word if not lines[-1] else f"{lines[-1]} {word}"
        lines = [*lines, word] if word.startswith("--") else [*lines[:-1], joined]
    return "exec " + f" {chr(92)}{chr(10)}{' ' * indent}".join(lines)


def _script(serving: Serving, where: str, body: str) -> str:
    """A shell script: $MODEL names the checkpoint; where: lines of comment."""
    name = "".join(c for c in str(serving.step.model["name"]) if c.isprintable())
    served = arriving(serving.traffic) if serving.traffic else together_words(serving.shape)
    return (
        "#!/bin/bash\n"
        f"# {name}: {served}.\n"
        f"{where}"
        "set -euo pipefail\n"
        "MODEL=${MODEL:?a checkpoint of the model: a folder, or its name on the hub}\n"
        f"{body}"
    )
