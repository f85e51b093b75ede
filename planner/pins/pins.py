"""Decisions a user fixes: mesh axes, techniques, splits or layouts of nodes and tensors, and what
is forbidden.

    [mesh]        tensor = { size = 8 }       or  tensor = 8, data = [4, 8]  (a list: one of these)
                  tensor = { size = 8, level = "nvlink" }     the links that an axis runs over, a
                  name or a list stage = [1, 4]          pipeline stages; the other axes are those
                  of one stage, found by the search where none is given
    [techniques]  zero_stage = 3, recompute = "block", microbatches = 4, schedule = "interleaved",
                  virtual = 2 widths = [2, 1, 1]      places of the stage axis that each stage
                  takes, of stages without a block in common (stage = 4) offload = ["optimizer"]
                  what waits in the host's memory ("none", or [], keeps all on the devices) bucket =
                  "25 MB"        gradients and updated parameters are sent together up to that size
                  ("auto": the best; "none": as the compiler does by itself) copies = 2
                  microbatches that run at the same time, the communication of one under the
                  products of the other (1: one after the other) zero_group = 8
                  neighbouring devices that share one copy of what zero_stage cuts (all replicas
                  where it is not said) tensor = "megatron"     what "tensor" cuts: columns and
                  rows, never positions ("megatron-sp": positions too, outside products)
    [forbid]      factors = ["s"]
    ["layers.*.mlp.up"]   split = { n = ["tensor"] }     ids, fused members, tensors or scope globs
                          layout = [["data"], []]        of the first result, or of the parameter
                          where the name is a parameter's

A split holds the factors it names, each cut by the axes listed and no others (`n = []`: left
whole); the other axes are free to cut the other factors. Axes may have the names that
planner.pins.dialects lists (`tp`, `dp`, `pp`, ...; `model`, which `tensor` was called before). A
short form for the command line: `tp=8,pp=4,micro=8,recompute=block,zero=3,dp=8,offload=optimizer`.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodels.hardware.intake import exists, read_toml
from planner.errors import PlanError, did_you_mean
from planner.execution.save_policies import is_named
from planner.execution.techniques import BY_NAME, TENSOR
from planner.graph.ir import Graph, Node
from planner.machine.mesh_choices import divisors
from planner.pins.conflicts import check, placement
from planner.pins.dialects import AXES as SPOKEN_AXES
from planner.pins.dialects import (
    SPOKEN,
    SPOKEN_TECHNIQUES,
    axis_meant,
    flag_meant,
    key_meant,
    settle,
)
from planner.sharding.candidates import candidates
from planner.sharding.layout import STAGE
from planner.sharding.rule import PENDING, Limits, Rule, Split, legal

if TYPE_CHECKING:
    from planner.analysis.facts import GraphFacts

SECTIONS = ("mesh", "techniques", "forbid")
"""Tables of a TOML file that are no globs."""
PINS_FORMS = "a TOML file, or the short form tp=8,micro=2"
AXES = re.compile(r"stage|(data|fsdp|tensor|sequence|expert|replicated)\d*")
"""Axes of the short form; a TOML file may name others."""
ORDER = (STAGE, "replicated", "data", "fsdp", "expert", "sequence", "tensor")
"""Axes from the slowest links to the fastest."""


@dataclass(frozen=True)
class Pins:
    """Parsed pins. mesh: axis -> sizes to choose from; nodes: glob -> table; levels: axis -> names
    of the levels that it runs over."""

    mesh: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    techniques: Mapping[str, Any] = field(default_factory=dict)
    forbidden_factors: frozenset[str] = frozenset()
    nodes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    levels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises PlanError P024 for pins that contradict each other."""
        check(self.mesh, self.techniques, self.forbidden_factors, self.nodes)

    @property
    def empty(self) -> bool:
        """Whether nothing is pinned."""
        return not (self.mesh or self.techniques or self.forbidden_factors or self.nodes)

    def table(self) -> dict[str, Any]:
        """The pins as a TOML document holds them: `from_table` makes equal ones of it."""
        mesh = {
            a: {
                "size": list(sizes),
                **({"level": list(self.levels[a])} if a in self.levels else {}),
            }
            for a, sizes in self.mesh.items()
        }
        techniques = {k: BY_NAME[k].in_pins(v) for k, v in self.techniques.items()}
        sections = {
            "mesh": mesh,
            "techniques": techniques,
            "forbid": {"factors": sorted(self.forbidden_factors)} if self.forbidden_factors else {},
        }
        return {k: v for k, v in sections.items() if v} | {
            glob: dict(table) for glob, table in self.nodes.items()
        }

    def each(self) -> list[tuple[str, Pins]]:
        """Every single pin in words, and the pins without it."""
        pins = [
            (
                f"{a} = {' or '.join(map(str, sizes))}",
                replace(self, mesh=_without(self.mesh, a), levels=_without(self.levels, a)),
            )
            for a, sizes in self.mesh.items()
        ]
        pins += [
            (f"{k} = {BY_NAME[k].shown(v)}", replace(self, techniques=_without(self.techniques, k)))
            for k, v in self.techniques.items()
        ]
        pins += [
            (f"forbid {f}", replace(self, forbidden_factors=self.forbidden_factors - {f}))
            for f in sorted(self.forbidden_factors)
        ]
        return pins + [
            (f"{glob}: {placement(table)}", replace(self, nodes=_without(self.nodes, glob)))
            for glob, table in self.nodes.items()
        ]

    @property
    def named(self) -> frozenset[str]:
        """Mesh axes the user named."""
        return frozenset(
            self.mesh.keys()
            | {
                a
                for table in self.nodes.values()
                for axes in (*table.get("split", {}).values(), *table.get("layout", ()))
                for a in axes
            }
        )

    @property
    def axes(self) -> frozenset[str]:
        """Mesh axes that are held to their names: those the user named, and of a pinned mesh the
        one that takes what is left (next to stages alone none does)."""
        return self.named | ({"data", "tensor"} if self.mesh.keys() - {STAGE} else set())

    @property
    def tensor(self) -> str:
        """What the axis "tensor" may cut: of TENSOR."""
        return str(self.techniques.get("tensor", TENSOR[0]))

    def mesh_choices(self, devices: int) -> list[dict[str, int]]:
        """Every mesh the pins allow; an axis "data" (or "tensor") without a size takes what is
        left, next to stages alone one or both in all ways."""
        names = list(self.mesh)
        choices = []
        for sizes in itertools.product(*self.mesh.values()):
            table = dict(zip(names, sizes, strict=True))
            remaining, rest = divmod(devices, prod(sizes))
            if rest:
                continue
            if names == [STAGE]:
                choices += [
                    table | {a: n for a, n in (("data", remaining // k), ("tensor", k)) if n > 1}
                    for k in divisors(remaining)
                    if k < remaining or remaining == 1
                ]
                continue
            if remaining > 1:
                free = next((a for a in ("data", "tensor") if a not in table), None)
                if free is None:
                    continue
                table = {free: remaining, **table} if free == "data" else {**table, free: remaining}
            order = sorted(
                table,
                key=lambda a: (
                    ORDER.index(plain) if (plain := a.rstrip("0123456789")) in ORDER else len(ORDER)
                ),
            )  # stable: tensor before tensor2
            choices.append({a: table[a] for a in order})
        if not choices:
            pinned = ", ".join(
                f"{a} {' or '.join(map(str, sizes))}" for a, sizes in self.mesh.items()
            )
            raise PlanError(
                "P022",
                f"the pinned mesh ({pinned}) does not multiply to {devices} devices",
                help=["axis sizes that divide the devices"],
            )
        # One stage is none, nor is one device of an axis whose size was to be found.
        spare = {STAGE, *(a for a, sizes in self.mesh.items() if len(sizes) > 1)}
        return [
            {a: n for a, n in table.items() if n > 1 or a not in spare} or {"data": 1}
            for table in choices
        ]

    def allowed(self, base: GraphFacts, mesh: Mapping[str, int]) -> dict[int, tuple[Split, ...]]:
        """Per class of nodes the splits the pins leave. A glob that matches nothing, or a split
        that is not legal, is an error."""
        graph = base.graph
        splits_of: dict[int, tuple[Split, ...]] = {}
        by: dict[int, str] = {}  # class -> the pin that decided it so far
        for glob, table in self.nodes.items():
            hits = _hits(graph, glob)
            if not hits:
                known = [n.id for n in graph.nodes] + [n.scope for n in graph.nodes if n.scope]
                raise PlanError(
                    "P023",
                    f"pin {glob!r} matches no node, tensor or scope",
                    help=[
                        did_you_mean(glob, known)
                        or "`plan ops MODEL` prints the names of all operators"
                    ],
                )
            usable = 0
            for i in hits:
                splits = self._pinned(base, i, glob, table, mesh)
                if splits:
                    c = base.shared[i]
                    both = tuple(s for s in splits_of.get(c, splits) if s in splits)
                    if not both:
                        other = by[c]
                        raise PlanError(
                            "P024",
                            f"pins {other!r} and {glob!r} contradict each other at"
                            f" {graph.nodes[i].id!r}",
                            detail=[
                                f"{other!r}: {dict(self.nodes[other])}",
                                f"{glob!r}: {dict(table)}",
                            ],
                            help=["remove one of them"],
                        )
                    splits_of[c], by[c] = both, glob
                    usable += 1
            if not usable:
                node = graph.nodes[hits[0]]
                raise PlanError(
                    "P025",
                    f"pin {glob!r}: {dict(table)} is not possible for {node.id!r} ({node.op})",
                    detail=[f"factors {dict(base.rules[hits[0]].sizes)}, mesh {dict(mesh)}"],
                    help=_instead(table, base.rules[hits[0]], mesh),
                )
        return splits_of

    def _pinned(
        self, base: GraphFacts, i: int, glob: str, table: Mapping[str, Any], mesh: Mapping[str, int]
    ) -> tuple[Split, ...]:
        rule = base.rules[i]
        if "split" in table:
            cuts = {str(f): tuple(a) for f, a in table["split"].items()}
            split = Split.of(cuts)
            if (
                not split.used <= set(mesh)
                or not all(f in rule.sizes or f in rule.paired or f == PENDING for f in cuts)
                or not legal(rule, split, mesh, Limits(waste=0.5))
            ):
                return ()
            limits = Limits(
                forbidden=self.forbidden_factors.union(cuts), pending=PENDING not in cuts
            )
            rest = candidates(rule, {a: n for a, n in mesh.items() if a not in split.used}, limits)
            joined = (Split.of({**dict(split.pairs), **dict(r.pairs)}) for r in rest)
            return base.reachable(
                i, tuple(s for s in joined if legal(rule, s, mesh, Limits(waste=0.5)))
            )
        if "layout" in table:
            want = tuple(tuple(a) for a in table["layout"])
            slot = _weight_slot(glob, base.graph.nodes[i], base)
            if slot is not None:
                return tuple(
                    s
                    for s in base.reachable(i, candidates(rule, mesh))
                    if rule.operand(slot, s, tuple(mesh)).dims == want
                )
            return tuple(
                s
                for s in base.reachable(i, candidates(rule, mesh))
                if rule.result(0, s, tuple(mesh)).dims == want
            )
        return base.reachable(i, candidates(rule, mesh))


def _instead(table: Mapping[str, Any], rule: Rule, mesh: Mapping[str, int]) -> list[str]:
    """Help on axes that the mesh has not, factors that the operator has not or that are not cut so;
    else where to look."""
    split = table.get("split", {})
    axes = dict.fromkeys(
        a for names in (*split.values(), *table.get("layout", [])) for a in names if a not in mesh
    )
    lines = [f"the mesh has no axis {a!r}: it has {', '.join(mesh) or 'none'}" for a in axes]
    for f, cut_axes in split.items():
        if f not in rule.sizes and f not in rule.paired and f != PENDING:
            lines.append(f"the operator has no factor {f!r}: it has {', '.join(rule.sizes)}")
        elif not axes and not legal(rule, Split.of({f: tuple(cut_axes)}), mesh, Limits(waste=0.5)):
            fits = [
                n
                for n in divisors(max(rule.sizes.get(m, 1) for m in rule.members(f)))
                if n > 1 and legal(rule, Split(((f, ("x",)),)), {"x": n}, Limits())
            ]
            pieces = prod(mesh[a] for a in cut_axes)
            lines.append(
                f"{f!r} is not cut into {pieces} by {' + '.join(cut_axes)}: "
                + (f"it is into {' or '.join(map(str, fits[:6]))}" if fits else "it stays whole")
            )
    return lines or [
        "an axis cuts one dim of an operator: `plan ops MODEL` prints the factors of every"
        " operator, and which stay whole"
    ]


def _without(table: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in table.items() if k != key}


def _weight_slot(glob: str, node: Any, base: GraphFacts) -> int | None:
    """The operand that a glob means where it is a parameter's name and not the node's own."""
    if any(
        name and fnmatch.fnmatchcase(name, glob)
        for name in (node.id, node.scope, *node.members, *node.outputs)
    ):
        return None
    graph = base.graph
    named = (
        k
        for k, n in enumerate(node.inputs)
        if n in graph.weights
        and any(fnmatch.fnmatchcase(x, glob) for x in (n, graph.labels.get(n, n)))
    )
    return next(named, None)


def _hits(graph: Graph, glob: str) -> list[int]:
    """The node of that id, or all nodes of which a name matches (scope, members, results,
    operands)."""
    key = "nodes by name"
    if key not in graph.memo:
        by_id, by_name = dict[str, list[int]](), dict[str, list[int]]()
        for i, node in enumerate(graph.nodes):
            by_id.setdefault(node.id, []).append(i)
            for name in dict.fromkeys(_names(node, graph.labels)):
                by_name.setdefault(name, []).append(i)
        graph.memo[key] = by_id, by_name
    by_id, by_name = graph.memo[key]
    if glob in by_id:
        return list(by_id[glob])
    if not WILD.search(glob):
        return list(by_name.get(glob, ()))
    matching = (nodes for name, nodes in by_name.items() if fnmatch.fnmatchcase(name, glob))
    return sorted({i for nodes in matching for i in nodes})


WILD = re.compile(r"[*?\[]")
"""What makes a name a pattern (fnmatch)."""


def _names(node: Node, labels: Mapping[str, str]) -> Iterator[str]:
    """What a pin may call a node by."""
    names = (
        node.id,
        node.scope,
        *node.members,
        *node.outputs,
        *node.inputs,
        *(labels.get(n, "") for n in node.inputs),
    )
    return filter(None, names)


def parse_pins(text: str | Path | Mapping[str, Any] | None) -> Pins:
    """Pins from a TOML file, the short form, or a table as such a file holds; "" or None gives
    none."""
    if not text:
        return Pins()
    if isinstance(text, Mapping):
        return from_table(text)
    if not isinstance(text, str | Path):
        raise PlanError(
            "P020",
            f"pins are {text!r} ({type(text).__name__})",
            help=[f"{PINS_FORMS}, or a dict such as {{'mesh': {{'tensor': 8}}}}"],
        )
    if "=" in str(text) and not exists(text):
        return _short(str(text))
    try:
        data = read_toml(text)
    except OSError as e:
        raise PlanError(
            "P020", f"cannot read pins {str(text)!r}: {e.strerror}", help=[PINS_FORMS]
        ) from e
    except ValueError as e:
        raise PlanError("P020", f"{text} is not TOML: {e}") from e
    return from_table(data)


def joined_pins(texts: Sequence[str]) -> str | Pins | None:
    """What `parse_pins` takes, of several such texts together: short forms are read as one, files
    beside them. Raises PlanError P020 where two say different things of an axis, a technique or a
    place."""
    if len(texts) < 2:
        return texts[0] if texts else None
    short = [text for text in texts if "=" in text and not exists(text)]
    if len(short) == len(texts):
        return ",".join(short)
    result = parse_pins(",".join(short))
    for text in texts:
        if text not in short:
            result = _joined(result, parse_pins(text), text)
    return result


def _joined(first: Pins, second: Pins, where: str) -> Pins:
    """Two pins as one; where: what the second is from."""

    def both(
        mine: Mapping[str, Any], others: Mapping[str, Any], shown: Callable[[str, Any], str]
    ) -> dict[str, Any]:
        for key in mine:
            if key in others and mine[key] != others[key]:
                raise PlanError(
                    "P020",
                    f"{key} is pinned twice: {shown(key, mine[key])}, and"
                    f" {shown(key, others[key])} in {where}",
                    help=["leave one of them"],
                )
        return {**mine, **others}

    def listed(_: str, values: Any) -> str:
        return " or ".join(map(str, values))

    return Pins(
        both(first.mesh, second.mesh, listed),
        both(first.techniques, second.techniques, lambda key, value: BY_NAME[key].shown(value)),
        first.forbidden_factors | second.forbidden_factors,
        both(first.nodes, second.nodes, lambda _, table: placement(table)),
        both(first.levels, second.levels, listed),
    )


def _spelled_out(data: Mapping[str, Any]) -> dict[str, Any]:
    """A document in which axes have the names that those of the short form (`tp`, `dp`, `pp`) and
    of older files (`model`) stand for, in [mesh], splits and layouts."""
    mesh = data.get("mesh", {})
    if not isinstance(mesh, dict):
        return dict(data)
    by: dict[str, str] = {}
    for axis in mesh:
        if (other := by.setdefault(axis_meant(axis), axis)) != axis:
            raise PlanError(
                "P020",
                f"[mesh] has both {other!r} and {axis!r}, which are one axis",
                help=["leave one of them"],
            )

    def full(axes: Any) -> Any:
        return (
            [axis_meant(a) if isinstance(a, str) else a for a in axes]
            if isinstance(axes, list)
            else axes
        )

    def placed(table: Any) -> Any:
        if not isinstance(table, dict):
            return table
        split, layout = table.get("split"), table.get("layout")
        cuts = (
            {"split": {f: full(axes) for f, axes in split.items()}}
            if isinstance(split, dict)
            else {}
        )
        return (
            table
            | cuts
            | ({"layout": [full(axes) for axes in layout]} if isinstance(layout, list) else {})
        )

    sections = {k: v if k in SECTIONS else placed(v) for k, v in data.items()}
    return sections | ({"mesh": {axis_meant(a): v for a, v in mesh.items()}} if mesh else {})


def from_table(data: Mapping[str, Any]) -> Pins:
    """Pins from a parsed TOML document."""
    data = _spelled_out(data)
    for section in SECTIONS:
        if not isinstance(data.get(section, {}), dict):
            raise PlanError(
                "P020",
                f"{section} = {data[section]!r} is no table",
                help=[f"[{section}], and below it a line each"],
            )
    mesh = {str(a): _sizes(a, v) for a, v in data.get("mesh", {}).items()}
    levels = {
        str(a): _levels(a, v["level"])
        for a, v in data.get("mesh", {}).items()
        if isinstance(v, dict) and "level" in v
    }
    techniques = {k: _technique(k, v) for k, v in data.get("techniques", {}).items()}
    forbidden = data.get("forbid", {}).get("factors", [])
    if not _words(forbidden):
        raise PlanError(
            "P020",
            f"[forbid] factors = {forbidden!r} is no list of factors",
            help=['factors = ["s"]'],
        )
    nodes = {k: v for k, v in data.items() if k not in SECTIONS}
    for glob, table in nodes.items():
        if not _placed(table):
            raise PlanError(
                "P020",
                f"pin {glob!r} needs `split = {{ factor = [axes] }}` or `layout = [[axes], ...]`",
                help=['split = { n = ["tensor"] }'],
            )
    settle(mesh, techniques, {})
    return Pins(mesh, techniques, frozenset(forbidden), nodes, levels)


def _words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(x, str) for x in value)


def _placed(table: Any) -> bool:
    """Whether a table says where an operator or tensor goes: axes by factor, or by dim."""
    if not isinstance(table, dict) or not set(table) <= {"split", "layout"}:
        return False
    split, layout = table.get("split", {}), table.get("layout", [])
    return (
        isinstance(split, dict)
        and isinstance(layout, list)
        and all(_words(axes) for axes in (*split.values(), *layout))
    )


def _sizes(axis: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, dict) and set(value) - {"size", "level"}:
        raise PlanError(
            "P020",
            f"[mesh] {axis} = {value!r}: unknown key",
            help=['{ size = 8 }, or { size = 8, level = "nvlink" }'],
        )
    value = value.get("size") if isinstance(value, dict) else value
    sizes = value if isinstance(value, list) else [value]
    if not sizes or not all(
        isinstance(s, int) and not isinstance(s, bool) and s > 0 for s in sizes
    ):
        raise PlanError("P020", f"[mesh] {axis} = {value!r}: a size, or a list of sizes")
    return tuple(sizes)


def _levels(axis: str, value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not _words(names) or not names:
        raise PlanError(
            "P020",
            f"[mesh] {axis}: level = {value!r} is no name of a level",
            help=['level = "nvlink", or a list of names (plan hardware NAME lists them)'],
        )
    return tuple(names)


def _technique(key: str, value: Any) -> Any:
    if key not in BY_NAME:
        meant = [f"did you mean {SPOKEN_TECHNIQUES[key]!r}?"] if key in SPOKEN_TECHNIQUES else []
        raise PlanError(
            "P020", f"unknown technique {key!r}", help=[*meant, f"one of {', '.join(BY_NAME)}"]
        )
    return BY_NAME[key].of_pin(value)


def _parts(text: str) -> list[str]:
    """A short form's pins; names of values that are saved have commas of their own."""
    parts: list[str] = []
    for part in text.split(","):
        if "=" not in part and parts and is_named(parts[-1].partition("=")[2].strip()):
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    return parts


def _short(text: str) -> Pins:
    mesh: dict[str, tuple[int, ...]] = {}
    techniques: dict[str, Any] = {}
    spoken: dict[str, Any] = {}
    for part in _parts(text):
        name, _, value = part.partition("=")
        key = key_meant(name)
        plain: Any = int(value) if value.strip().isdigit() else value.strip()
        axis = AXES.fullmatch(key) is not None and plain not in TENSOR
        if key == "sequence" and isinstance(plain, str) and flag_meant(plain) is not None:
            key = "sp"  # Megatron's sequence_parallel is on or off
        table = (
            spoken
            if key in ("sp", "ddp")
            else (
                mesh
                if isinstance(plain, int) and axis
                else techniques
                if key in BY_NAME and not axis
                else None
            )
        )
        if table is None:
            words = [k for k in (*SPOKEN_TECHNIQUES, *BY_NAME, *SPOKEN_AXES, STAGE) if len(k) > 3]
            # two letters are like any two others
            suggestion = did_you_mean(key, words, 0.7) if len(key) > 3 else ""
            if axis:
                other = f", or one of {', '.join(TENSOR)}" if key == "tensor" else ""
                raise PlanError(
                    "P020",
                    f"{name.strip()} = {plain!r} is not possible",
                    help=[f"a number of devices{other}"],
                )
            raise PlanError(
                "P020",
                f"cannot read pin {part.strip()!r}",
                help=[
                    h for h in (suggestion, f"one of {SPOKEN}; or a TOML file (docs/modes.md)") if h
                ],
            )
        pinned = (
            _technique(key, plain)
            if table is techniques
            else _sizes(key, plain)
            if table is mesh
            else plain
        )
        if table.setdefault(key, pinned) != pinned:
            sizes = ", or a TOML file with a list of sizes to choose from" if table is mesh else ""
            raise PlanError(
                "P020", f"{key} is pinned twice in {text!r}", help=[f"leave one of them{sizes}"]
            )
    settle(mesh, techniques, spoken)
    return Pins(mesh, techniques)
