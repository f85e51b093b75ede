"""What a compiled program communicates and multiplies, read from its optimised HLO text
(`compiled.as_text()`). No jax here.

Per device and per run of the program, with n devices in a group (semantics.md, Quantities):

    kind                 payload             wire (ring)
    all-reduce           operand bytes       2 (n-1)/n payload
    all-gather           result bytes          (n-1)/n payload
    reduce-scatter       operand bytes         (n-1)/n payload
    all-to-all           operand bytes         (n-1)/n payload
    collective-permute   operand bytes                 payload     (of a device that sends)

Payload is read from the operands only, so `-start` forms with their nested result tuples need no
care and `-done` forms add nothing. Mesh: devices row-major in `mesh_axes`. Loops multiply, of a
conditional the heaviest branch is totalled (`hlo_walk`). Not counted: send/recv pairs and
collective-broadcast, which jax programs do not write.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from planner.verify.hlo.flops import dot_flops
from planner.verify.hlo.groups import MeshAxes, axes_label, groups, pairs, permute_label
from planner.verify.hlo.reduce_scatter import sliced_by_partition
from planner.verify.hlo.text import Computation, Instruction, Module, Shape, parse
from planner.verify.hlo.trip_counts import walk

__all__ = ["Collective", "collectives", "dot_flops", "traffic"]

_KINDS = {
    "all-reduce": "all-reduce",
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
    "collective-permute": "collective-permute",
}


@dataclass(frozen=True)
class Collective:
    """One collective instruction. Bytes are for one device and one execution; multiply by `count`.

    axes: names in mesh order joined by "+", or "irregular:..." when the groups follow no axes.
    count: runs, loops multiplied. dtype: XLA's name as sent ("f32"; "bf16+f32" for a mixed tuple).
    promoted: sent wider than computed: XLA's CPU compiler sends bf16 as f32, twice the bytes of an
    accelerator (certain for reductions; for other kinds an operand just converted from 16 bits).
    unknown_loop: the enclosing loop whose trip count the text does not tell. branch:
    "conditional/branch" path; heaviest: False when another branch of that conditional moves more,
    and totals skip this one.
    """

    kind: str
    axes: str
    payload_bytes: int
    wire_bytes: Fraction
    count: int
    dtype: str
    name: str
    op_name: str = ""
    promoted: bool = False
    unknown_loop: str = ""
    branch: str = ""
    heaviest: bool = True


@dataclass(frozen=True)
class _Found:
    """A collective before its loop count is known; `key` tells repeats of one TPU asynchronous
    collective apart."""

    collective: Collective
    key: tuple[str, ...] = ()


def collectives(
    text: str,
    mesh_axes: MeshAxes,
    *,
    device_ids: Sequence[int] | None = None,
    merge_ar_slice: bool = False,
) -> tuple[Collective, ...]:
    """Every collective of a compiled program, in program order; those over one device only are left
    out.

    Args:
        text: optimised HLO of the whole module. mesh_axes: (name, size) of every mesh axis,
        outermost first; axes of size 1 never appear in results. device_ids: the id in the text of
        each row-major mesh position; default 0, 1, 2 ... (what jax writes, whatever the devices).
        merge_ar_slice: report an all-reduce of which each device only keeps its own slice as the
        reduce-scatter it stands for
            (the CPU partitioner of jit programs writes these). TPU's fused `%all-reduce-scatter` is
            always reported so.

    Raises:
        ValueError: not HLO, unreadable groups, or device ids outside the mesh.
    """
    module = parse(text)
    reader = _Reader(
        module, mesh_axes, math.prod(size for _, size in mesh_axes), device_ids, merge_ar_slice
    )
    sites = walk(
        module,
        reader.read,
        lambda readings: sum((f.collective.wire_bytes for f in readings), Fraction(0)),
    )
    seen: set[tuple[str, ...]] = set()
    counted = []
    for site in sites:
        for reading in site.selected:
            if reading.key:
                if reading.key in seen:
                    continue
                seen.add(reading.key)
            c = reading.collective
            counted.append(
                replace(
                    c,
                    count=site.count,
                    unknown_loop=site.unknown_loop,
                    branch=site.branch,
                    heaviest=site.heaviest,
                )
            )
    return tuple(counted)


def traffic(
    text: str,
    mesh_axes: MeshAxes,
    *,
    device_ids: Sequence[int] | None = None,
    merge_ar_slice: bool = False,
) -> dict[str, dict[str, dict[str, int | Fraction]]]:
    """Totals of `collectives`: kind -> axes -> {"payload": int, "wire": Fraction} in bytes, counts
    multiplied, kinds and axes sorted.

    Raises:
        ValueError: as `collectives`.
    """
    totals: dict[tuple[str, str], list[Fraction]] = {}
    for c in collectives(text, mesh_axes, device_ids=device_ids, merge_ar_slice=merge_ar_slice):
        if c.heaviest:
            entry = totals.setdefault((c.kind, c.axes), [Fraction(0), Fraction(0)])
            entry[0] += c.payload_bytes * c.count
            entry[1] += c.wire_bytes * c.count
    table: dict[str, dict[str, dict[str, int | Fraction]]] = {}
    for (kind, axes), (payload, wire) in sorted(totals.items()):
        table.setdefault(kind, {})[axes] = {"payload": int(payload), "wire": wire}
    return table


def wire(kind: str, payload_bytes: int, group: int) -> Fraction:
    """Ring bytes a device sends for `payload_bytes` in a group of `group` devices."""
    if kind == "collective-permute":
        return Fraction(payload_bytes)
    return Fraction(payload_bytes * (group - 1) * (2 if kind == "all-reduce" else 1), group)


@dataclass(frozen=True)
class _Reader:
    module: Module
    mesh_axes: MeshAxes
    devices: int
    device_ids: Sequence[int] | None
    merge_ar_slice: bool

    def read(self, instruction: Instruction, computation: Computation) -> tuple[_Found, ...] | None:
        """The collectives of one instruction; () for one that exchanges nothing; None when it is no
        collective."""
        opcode = instruction.opcode.removesuffix("-start")
        if opcode not in _KINDS:
            return None
        kind = _KINDS[opcode]
        shapes = computation.operand_shapes(instruction)
        if kind == "collective-permute":
            members = pairs(instruction.attributes)
            axes, size = permute_label(members, self.mesh_axes, self.device_ids), 2
        else:
            members = groups(instruction.attributes, self.devices)
            axes, size = axes_label(members, self.mesh_axes, self.device_ids), len(members[0])
        if not axes:
            return ()
        key = _repeat_key(instruction, computation, kind)
        parts = self._parts(instruction, computation, kind, shapes, size)
        reducer = instruction.attribute(r"\bto_apply=%?([\w.\-]+)")
        promoted = (
            reducer.endswith("promoted")
            if reducer
            else all(self._widened(computation, name) for name in instruction.operands)
        )
        return tuple(
            _Found(
                Collective(
                    kind=part_kind,
                    axes=axes,
                    payload_bytes=payload,
                    wire_bytes=wire(part_kind, payload, size),
                    count=1,
                    dtype="+".join(sorted({s.dtype for s in part})),
                    name=instruction.name,
                    op_name=instruction.op_name,
                    promoted=promoted,
                ),
                key,
            )
            for part_kind, part, payload in parts
        )

    def _widened(self, computation: Computation, name: str) -> bool:
        """Was this operand converted from a 16-bit float just before?"""
        source = computation.by_name[name]
        if source.opcode == "fusion":
            computation = self.module.computations[source.callees[0]]
            source = computation.root
        while source.opcode in ("bitcast", "copy", "transpose"):
            source = computation.by_name[source.operands[0]]
        return source.opcode == "convert" and computation.operand_shapes(source)[0].dtype in (
            "bf16",
            "f16",
        )

    def _parts(
        self,
        instruction: Instruction,
        computation: Computation,
        kind: str,
        shapes: tuple[Shape, ...],
        size: int,
    ) -> list[tuple[str, tuple[Shape, ...], int]]:
        """(kind, arrays, payload): one, or two when only some operands of an all-reduce are
        scattered by slicing."""
        if kind == "all-gather":
            return [(kind, shapes, sum(s.size_bytes for s in shapes) * size)]
        keeps = (False,) * len(shapes)
        if kind == "all-reduce" and _is_tpu_scatter(computation):
            keeps = (True,) * len(shapes)
        elif kind == "all-reduce" and self.merge_ar_slice:
            keeps = sliced_by_partition(self.module, computation, instruction, size)
        scattered = tuple(s for s, keep in zip(shapes, keeps, strict=True) if keep)
        whole = tuple(s for s, keep in zip(shapes, keeps, strict=True) if not keep)
        parts = [("reduce-scatter", scattered), (kind, whole)]
        return [(k, part, sum(s.size_bytes for s in part)) for k, part in parts if part]


def _is_tpu_scatter(computation: Computation) -> bool:
    return computation.name.startswith("all-reduce-scatter")


def _repeat_key(instruction: Instruction, computation: Computation, kind: str) -> tuple[str, ...]:
    """TPU writes one asynchronous collective three times: in the fusion that starts it, in one that
    computes beside it, in one that waits for it. The three share kind, channel and (newer
    compilers) `chain_id`; channels alone are not unique in shard_map programs.
    """
    is_part = computation.name.startswith("async_collective_fusion") or any(
        'custom_call_target="AsyncCollective' in i.line
        for i in computation.instructions
        if i.line.find("custom-call(") > 0
    )
    if not is_part:
        return ()
    channel = instruction.attribute(r"\bchannel_id=(\d+)")
    chain = instruction.attribute(r'\bchain_id="(\d+)"')
    return (kind, "scatter" if _is_tpu_scatter(computation) else "", channel, chain)
