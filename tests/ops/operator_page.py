"""Writes docs/operators.md from the tables of the reader, the rules and the backend: `python -m
tests.ops.operator_page > docs/operators.md`.

The splits shown are those of the oracle's cases, so every line of the page is one that the oracle
holds against the unsharded kernel.
"""

from __future__ import annotations

from collections.abc import Iterable

from onnx import defs

from planner.onnx_backend.handlers import HANDLERS
from planner.ops import OPERATORS, operator_of
from planner.ops.lookup import rule_of
from planner.reader.lower.opaque import _NEVER
from planner.reader.lower.table import TABLE
from planner.sharding.rule import Rule
from tests.ops.oracle import Case, build
from tests.ops.oracle_cases import all_cases

HEAD = """# Operators

Generated: `python -m tests.ops.operator_page > docs/operators.md` (a test keeps it current). It has three parts: what a graph holds and how it may be split, what
becomes of each ONNX operator, and what exporters do to a model before it is read.

## What a graph holds

One row per form that the oracle checks: outputs and gradients of every split equal those of the unsharded kernel. In a rule each letter is a factor
that mesh axes may cut; `k!` stays whole; `(h d)` is one dim made of two factors. A factor that a result lacks is summed: cutting it leaves the result as terms
of a sum, which a later collective completes. *linear* operators also pass such terms on. Every operator here is emitted.

| operator | rule | cut evenly only | linear | gradient |
|---|---|---|---|---|"""

ONNX = """
## ONNX operators

*since*: the versions of the operator that exist; each is read by its own meaning. *read as*: `lowered` becomes operators of the first table (shape arithmetic is folded);
`kept` has a row there under its own name; `by its body` is replaced by the function that defines it; `whole` is planned on every device alike and has no kernel in
programs; otherwise why it cannot be planned. *backend*: whether `planner.onnx_backend` runs it with the kernels of programs, by a handler of its own, or by its body.

| operator | since | read as | backend |
|---|---|---|---|"""

FACTS = """
## What exporters do

- **Dropout and BatchNormalization**: models exported for evaluation have no Dropout, and BatchNormalization is folded into the convolution before it. Training such a file
  trains another network than the one that was written; export with `training=TRAINING` to keep both.
- **Names**: linear weights are stored transposed under generated names (`val_109`, `onnx::MatMul_651`). Parameters are named here by module path and slot
  (`layers.3.mlp.up.weight`), and what trains is decided by the slot a constant feeds.
- **Ties**: a tied output head often becomes a copy of the embedding; equal-valued norm scales are often merged into one tensor. Both are said when a model is
  planned ([training](training.md)).
- **Shapes**: static exports bake the batch into Reshape targets and index tables; another `--batch` is traced through them, or refused with the name of the constant.
- **Mixture of experts**: exports gather the weights of the chosen experts per token, or let every expert work on every token, with stacked weights or with weights of
  its own for each expert; all are read as RoutedExperts, whose work is that of the chosen experts and whose tokens travel to their experts (weights of their own become
  stacks). Forms that are not known get a note. Dispatch with a capacity stays as it is written: it drops tokens. A loop that looks up each expert's tokens
  by NonZero, as the tracing exporter writes it, is read too where the trace saw every expert chosen. [Exporting](exporting.md#mixtures-of-experts) says what to export.
- **Tables in every layer**: rotary tables and masks that are written anew in every layer are merged before layers are compared.
- **Recurrences** are unrolled over the exported sequence by most exporters; LSTM, GRU and RNN stay operators.
- **Large models**: files above 2 GiB keep weights beside the model; planning reads only the graph, so the weights may be absent.
"""


def spelled(rule: Rule) -> str:
    """A bound rule as the line it was parsed from."""
    mark = lambda f: f + ("!" if f in rule.whole else "")  # noqa: E731
    dim = lambda d: "1" if not d else mark(d[0]) if len(d) == 1 else f"({' '.join(map(mark, d))})"  # noqa: E731
    side = lambda tensors: ", ".join(" ".join(map(dim, t)) or "·" for t in tensors)  # noqa: E731
    pairs = "".join(f" ({name}: {' with '.join(members)})" for name, members in rule.paired.items())
    return f"{side(rule.operands)} -> {side(rule.results)}{pairs}"


def row(case: Case) -> str:
    """A line of the first table, or '' where one of the same operator says as much."""
    graph, _ = build(case)
    node = graph.nodes[0]
    rule, reason = rule_of(node, graph)
    assert not reason, reason
    differentiable = (
        any(graph.tensors[o].is_float for o in node.outputs)
        and bool(graph.trainable)
        and operator_of(node.op).differentiable
    )
    even = ", ".join(sorted(rule.no_pad & set(rule.factors)))
    return (
        f"| {case.op} | `{spelled(rule)}` | {even} | {'yes' if rule.linear else ''} |"
        f" {'yes' if differentiable else 'none'} |"
    )


def graph_rows() -> list[str]:
    """Distinct rows, operators in alphabetical order."""
    return list(
        dict.fromkeys(row(case) for case in sorted(all_cases(), key=lambda c: (c.op, c.name)))
    )


def read_as(op: str, schema: defs.OpSchema) -> str:
    """What the reader does with an operator."""
    if ("", op) in TABLE:
        return "lowered"
    if op in _NEVER:
        return f"cannot be planned: {_NEVER[op]}"
    if has_body(schema):
        return "by its body"
    if op in OPERATORS:
        return "kept"
    kinds = {str(t) for constraint in schema.type_constraints for t in constraint.allowed_type_strs}
    outputs = [t for o in schema.outputs for t in o.types]
    if outputs and all(not str(t).startswith("tensor") or "string" in str(t) for t in outputs):
        return (
            "cannot be planned:"
            f" {'sequences and optionals' if any('seq' in k or 'optional' in k for k in kinds) else 'text'}"
        )
    return "whole"


def has_body(schema: defs.OpSchema) -> bool:
    """Whether ONNX defines the operator by others."""
    return bool(schema.has_function or schema.has_context_dependent_function)  # type: ignore[attr-defined]


def run_by(op: str, schema: defs.OpSchema) -> str:
    """How the backend runs an operator."""
    lowered, body = ("", op) in TABLE, has_body(schema)
    ways = ["kernel"] if lowered or (op in OPERATORS and not body) else ["body"] if body else []
    ways += ["handler"] if ("", op) in HANDLERS else []
    return ", ".join(ways) or "no"


def onnx_rows() -> list[str]:
    """One row per operator of the standard domain that is not deprecated, at its newest version."""
    versions: dict[str, list[int]] = {}
    for schema in defs.get_all_schemas_with_history():
        if schema.domain == "":
            versions.setdefault(schema.name, []).append(schema.since_version)
    rows = []
    for op in sorted(versions):
        schema = defs.get_schema(op)
        if not schema.deprecated:
            rows.append(
                f"| {op} | {', '.join(map(str, sorted(versions[op])))} | {read_as(op, schema)} |"
                f" {run_by(op, schema)} |"
            )
    return rows


def counts(rows: Iterable[str]) -> str:
    """How many operators are read in which way."""
    found: dict[str, int] = {}
    for line in rows:
        way = line.split("|")[3].strip().split(":")[0]
        found[way] = found.get(way, 0) + 1
    return ", ".join(f"{n} {way}" for way, n in sorted(found.items(), key=lambda item: -item[1]))


def page() -> str:
    """The whole page."""
    rows = onnx_rows()
    return "\n".join(
        [HEAD, *graph_rows(), ONNX, *rows, "", f"Of {len(rows)}: {counts(rows)}.", FACTS]
    )


if __name__ == "__main__":
    print(page(), end="")
