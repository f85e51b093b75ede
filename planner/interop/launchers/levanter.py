"""Levanter: the trainer's keys of its YAML files.

    mesh.axes, mesh.dcn_axes        sizes of mesh axes within slices and between them; one of each
                                    may be -1: what is left. data, replica, replica_dcn cut the
                                    batch, model is tensor, context is sequence
    mesh.param_mapping              embed over an axis of the batch: parameters are sharded over
                                    it (ZeRO stage 3), which is so where nothing is said
    mesh.tensor_parallel_axes       named axes of the model over "model": mlp and heads where
                                    nothing is said
    model_axis_size, replica_ici_axis_size, replica_dcn_axis_size, fsdp_axis, axis_resources,
    tensor_parallel_axes, parameter_axis_resources      the same until 2025
    train_batch_size                rows of a step
    per_device_parallelism          rows of a microbatch on each device that has rows of its own,
                                    -1 for all
    gradient_checkpointing          of the model: recompute of every block; on where it is not said
    scan_layers                     of the model: layers in a loop, or written out

There are no pipeline stages, and no axis of experts. Source: utils/mesh.py (165dd09) and trainer.py
(00cba33) in lib/levanter/src/levanter of marin-community/marin, 2026; src/levanter/trainer.py of
marin-community/levanter, 9263f81 (September 2025), before it moved there.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from planner.errors import PlanError
from planner.interop import adapters, optimizers, precisions
from planner.interop.keys import Keys
from planner.interop.model_sizes import GROUPS, HEADS, HIDDEN, INNER, LAYERS, Claim, claims_of
from planner.interop.settings import Facts, Rounds, Settings, sharing

NAME, SUFFIX = "levanter", ".yaml"
MARKS = (
    r"mesh|model_axis_size|replica_(ici|dcn)_axis_size|per_device_parallelism"
    r"|tensor_parallel_axes|fsdp_axis|(parameter_)?axis_resources|num_train_steps"
)
BATCH = ("replica_dcn", "replica", "data")
"""Mesh axes that cut the batch."""
CUT = ("mlp", "heads", "vocab")
"""Named axes of a model that tensor parallelism cuts here."""
MESH = (
    "axes",
    "dcn_axes",
    "param_mapping",
    "tensor_parallel_axes",
    "shared_mapping",
    "compute_mapping",
)
"""Keys of a mesh that are read."""
ROWS = 512
"""train_batch_size where it is not said."""
SIZES = {
    LAYERS: ("num_layers",),
    HIDDEN: ("hidden_dim",),
    HEADS: ("num_heads",),
    GROUPS: ("num_kv_heads",),
    INNER: ("intermediate_dim",),
}


def round_off(rounds: Rounds, facts: Facts) -> list[str]:
    """Rounds settings to what Levanter can express; returns what it cannot and what has no
    price."""
    rounds.unstaged()
    rounds.together("no axis of experts: data parallel instead")
    rounds.usual("Levanter")
    if rounds.now.zero_stage in (1, 2):
        rounds.to("state, gradients and parameters are sharded alike: ZeRO-3", zero_stage=3)
    rounds.to("tensor parallelism leaves positions whole", positions=False)
    return []


def write(s: Settings, facts: Facts) -> str:
    """The keys that the plan decides, to be merged into a configuration."""
    over = [*(BATCH if s.copies == 1 else ["data"]), *(["context"] if s.sequence > 1 else [])]
    sizes = ["data: -1", f"replica: {s.copies}", f"model: {s.tensor}"]
    sizes += [f"context: {s.sequence}"] if s.sequence > 1 else []
    sharded = f"{{embed: [{', '.join(over)}]}}" if s.zero_stage else "{}"
    lines = [
        f"# {facts.model} on {s.devices} devices, {s.microbatches} microbatches. Merge into a"
        " configuration.",
        "model:",
        f"  gradient_checkpointing: {str(s.recompute == 'block').lower()}",
        *["  scan_layers: false"] * s.written_out,
        *([f"  seq_len: {s.length}"] if s.length else []),
        "trainer:",
        "  mesh:",
        f"    axes: {{{', '.join(sizes)}}}",
        f"    tensor_parallel_axes: [{', '.join(CUT)}]",
        f"    param_mapping: {sharded}",
        f"  train_batch_size: {s.batch}",
        f"  per_device_parallelism: {s.rows}",
        *(f"  {k}: {v}" for k, v in precisions.words(NAME, s.precision).items()),
    ]
    return "\n".join(lines) + "\n"


def claims(keys: Keys) -> tuple[Claim, ...]:
    """The sizes of the model that a file says. Raises PlanError P191."""
    return claims_of(keys, SIZES)


def read(keys: Keys, devices: int, domain: int) -> tuple[Settings, list[str]]:
    """Settings of a configuration and what it says beyond them. Raises PlanError P191 where keys
    contradict each other."""
    notes: list[str] = []
    mesh = keys.get("mesh")
    sizes, sharded, cut = (
        _mesh(mesh, notes) if isinstance(mesh, Mapping) else _axes(keys, devices // domain)
    )
    tensor, sequence = sizes.get("model", 1), sizes.get("context", 1)
    data, rest = divmod(devices, tensor * sequence)
    cuts = prod(sizes.get(a, 1) for a in BATCH)
    if rest or not data or data % cuts:
        raise PlanError(
            "P191",
            f"axes {dict(sizes)} do not divide {devices} devices",
            help=["--devices as many as the configuration runs on"],
        )
    if tensor > 1 and not cut:
        notes.append("nothing of the model is cut by the axis model: priced as tensor parallelism")
    zero = 3 if sharded and data * sequence > 1 else 0
    copies = prod(sizes.get(a, 1) for a in BATCH if a not in sharded) if zero else 1
    batch, microbatches = _batch(keys, data)
    if keys.get("fp8") or keys.get("int8"):
        notes.append("quantization is left out: products are priced as mp says")
    notes += [*adapters.notes_of(keys), *optimizers.notes_of(keys, "optimizer.type")]
    return (
        Settings(
            batch,
            data=data,
            sequence=sequence,
            tensor=tensor,
            microbatches=microbatches,
            zero_stage=zero,
            zero_group=sharing(copies, data, devices, domain, notes),
            recompute=_recompute(keys, notes),
            length=keys.whole(0, "train_seq_len", "seq_len", "max_seq_len"),
            precision=precisions.read(NAME, keys, notes),
        ).scanned(keys.flag(True, "scan_layers"), notes),
        notes,
    )


def _batch(keys: Keys, data: int) -> tuple[int, int]:
    """(rows of a step, microbatches). Raises PlanError P191 where they do not divide."""
    step_rows = keys.get("train_batch_size")
    if isinstance(step_rows, list):
        raise PlanError(
            "P191",
            "train_batch_size is a schedule: one batch is priced",
            help=["train_batch_size=N behind the file"],
        )
    batch = keys.whole(ROWS, "train_batch_size", least=-1)
    rows = keys.whole(-1, "per_device_parallelism", least=-1)
    if batch < 1 and rows < 1:
        raise PlanError("P191", "train_batch_size and per_device_parallelism are both -1")
    batch = rows * data if batch < 1 else batch
    of = f"per_device_parallelism {rows} x {data}" if rows > 0 else f"{data}"
    microbatches, rest = divmod(batch, rows * data) if rows > 0 else (1, batch % data)
    if rest or not microbatches:
        raise PlanError(
            "P191",
            f"train_batch_size {batch} is no multiple of {of} devices with rows of their own",
        )
    return batch, microbatches


def _mesh(mesh: Mapping[str, Any], notes: list[str]) -> tuple[dict[str, int], set[str], bool]:
    """(size of each axis that is said, axes that parameters are sharded over, whether "model" cuts
    anything) of a mesh. Raises PlanError P191."""
    sizes: dict[str, int] = {}
    for part in ("axes", "dcn_axes"):
        for name, n in _table(mesh, part).items():
            if type(n) is not int or n < -1 or n == 0:
                raise PlanError("P191", f"mesh.{part}.{name} = {n!r} is no size of an axis")
            if n > 1 and name not in (*BATCH, "model", "context"):
                raise PlanError(
                    "P191",
                    f"mesh.{part}.{name} = {n}: the planner has no such axis",
                    help=["fold it into data or model"],
                )
            sizes[name] = max(n, 1)  # -1: what is left
    mapping = _table(mesh, "param_mapping") if "param_mapping" in mesh else {"embed": "data"}
    over = {a for where in mapping.values() for a in _several(where)}
    axes = mesh.get("tensor_parallel_axes", ["mlp", "heads"])
    mapped = [*_table(mesh, "shared_mapping").values(), *_table(mesh, "compute_mapping").values()]
    cut = bool(axes) or any("model" in _several(where) for where in mapped)
    notes += [f"mesh.{key} was not read" for key in mesh if key not in MESH]
    return sizes, over & {*BATCH, "context"}, cut


def _axes(keys: Keys, slices: int) -> tuple[dict[str, int], set[str], bool]:
    """The same of the keys until 2025. slices: as many as replica_dcn_axis_size -1 stands for."""
    between = keys.whole(1, "replica_dcn_axis_size", least=-1)
    sizes = {
        "model": keys.whole(1, "model_axis_size"),
        "replica": keys.whole(1, "replica_ici_axis_size"),
        "replica_dcn": max(slices, 1) if between == -1 else between,
    }
    resources, parameters = keys.get("axis_resources"), keys.get("parameter_axis_resources")
    over = {a for w in (parameters or {}).values() for a in _several(w)} if parameters else set()
    if "fsdp_axis" not in keys or keys.get("fsdp_axis"):
        over.add("data")
    where = [a for w in resources.values() for a in _several(w)] if resources else []
    cut = bool(keys.get("tensor_parallel_axes")) or "model" in where
    return sizes, over & set(BATCH), cut


def _table(mesh: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = mesh.get(key) or {}
    if not isinstance(value, Mapping):
        raise PlanError("P191", f"mesh.{key} = {str(value)[:40]!r} is no table")
    return value


def _several(where: Any) -> list[str]:
    """Mesh axes of a mapping's entry, one or a list."""
    return [str(a) for a in where] if isinstance(where, list | tuple) else [str(where)]


def _recompute(keys: Keys, notes: list[str]) -> str:
    """Every block, or none; a policy is priced as every block."""
    value = keys.get("gradient_checkpointing")
    if value is False or value is None or value is True:
        return "none" if value is False else "block"
    notes.append(
        f"gradient_checkpointing {str(value)[:40]!r} is priced as recompute of every block"
    )
    return "block"
