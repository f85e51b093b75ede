"""A backward pass in two: gradients of inputs, and gradients of weights that can wait.

Both are read off the traced pass, so that no operator is written twice: what no result of the first
part reads belongs to the second, and what it reads of the first is handed on. Of a product the
first part has the input's gradient, the second the weight's, from the input that was saved and the
gradient of the result that is handed on.
"""

from __future__ import annotations

import jax
from jax import lax
from jax.extend import source_info_util

CALLS = ("jit", "pjit", "checkpoint", "remat2")
"""Primitives around operations of which each part may need some."""
REARRANGING = ("reshape", "transpose", "squeeze", "broadcast_in_dim", "pvary")
"""Primitives that run again where their results would be handed on."""


def backward_parts(pull, waits, saved, cotangents):
    """(now, later) of pull(saved, cotangents), a list of arrays. waits: of each whether it waits.

    now(saved, cotangents) -> (the arrays that do not wait, what is handed on); later(saved, handed
    on) -> those that do. The last two arguments are examples: `saved` a list of arrays.
    """
    leaves, tree = jax.tree.flatten((saved, cotangents))
    traced = jax.make_jaxpr(lambda *a: pull(*jax.tree.unflatten(tree, a)))(*leaves)
    flat = jax.make_jaxpr(lambda *a: calls_opened(traced.jaxpr, traced.consts, a))(*leaves)
    whole = jax.make_jaxpr(lambda *a: loops_halved(flat, a, waits, len(saved)))(*leaves)
    ins, outs = whole.jaxpr.invars, whole.jaxpr.outvars
    first, second, handed = parted(whole.jaxpr, waits, ins[: len(saved)], ins[len(saved) :])

    def now(saved, cotangents):
        values = evaluated(whole.jaxpr, whole.consts, first, jax.tree.leaves((saved, cotangents)))
        return [value_of(v, values) for v, wait in zip(outs, waits, strict=True) if not wait], [
            values[v] for v in handed
        ]

    def later(saved, handed_on):
        values = evaluated(
            whole.jaxpr, whole.consts, second, saved, dict(zip(handed, handed_on, strict=True))
        )
        return [value_of(v, values) for v, wait in zip(outs, waits, strict=True) if wait]

    return now, later


def value_of(atom, values):
    """The value of a variable or of a literal."""
    return atom.val if hasattr(atom, "val") else values[atom]


def evaluated(
    jaxpr, consts, operations, arguments, known=(), instead=lambda operation, operands: None
):
    """Variable -> value once these operations of a jaxpr have run. arguments: of its first
    variables; known: values of others; instead: results of an operation that runs otherwise."""
    values = dict(known) | dict(zip(jaxpr.constvars, consts, strict=True))
    values |= dict(zip(jaxpr.invars, arguments, strict=False))
    for each in operations:
        operands = [value_of(v, values) for v in each.invars]
        results = instead(each, operands)
        if results is None:
            operands, how = as_varying(each, operands)
            source = each.source_info
            names = source_info_util.current_name_stack() + source.name_stack
            with (
                source_info_util.user_context(source.traceback, name_stack=names),
                each.ctx.manager,
            ):
                results = each.primitive.bind(*operands, **how)
            results = results if each.primitive.multiple_results else [results]
        values |= dict(zip(each.outvars, results, strict=True))
    return values


def as_varying(operation, operands):
    """(operands, parameters) of an operation whose operands may differ between more devices than
    those it was traced with: what lay in a ring does. It gets them all alike, as then."""
    how = operation.primitive.get_bind_params(operation.params)
    if operation.primitive.name == "pvary":
        there = varying_axes(jax.typeof(operands[0]))
        return operands, how | {"axes": tuple(a for a in how["axes"] if a not in there)}
    if len({varying_axes(v.aval) for v in operation.invars}) > 1:
        return operands, how
    every = frozenset().union(*(varying_axes(jax.typeof(x)) for x in operands))
    missing = [tuple(every - varying_axes(jax.typeof(x))) for x in operands]
    return [
        lax.pcast(x, axes, to="varying") if axes else x
        for x, axes in zip(operands, missing, strict=True)
    ], how


def varying_axes(aval):
    """Mesh axes along which values of a type differ between devices."""
    return getattr(getattr(aval, "manual_axis_type", None), "varying", frozenset())


def calls_opened(jaxpr, consts, arguments):
    """The results of a jaxpr, the operations in CALLS as its own."""

    def instead(operation, operands):
        if operation.primitive.name not in CALLS:
            return None
        inner = operation.params["jaxpr"]
        opened = inner.jaxpr if hasattr(inner, "consts") else inner
        return calls_opened(opened, getattr(inner, "consts", ()), operands)

    values = evaluated(jaxpr, consts, jaxpr.eqns, arguments, instead=instead)
    return [value_of(v, values) for v in jaxpr.outvars]


def loops_halved(closed, arguments, waits, saved):
    """The results of a closed jaxpr, loops of which some results wait as two loops. saved: how many
    of its arguments are no cotangents."""
    jaxpr = closed.jaxpr
    needed = needed_variables(
        jaxpr, [v for v, wait in zip(jaxpr.outvars, waits, strict=True) if not wait]
    )
    reached = reached_variables(jaxpr, jaxpr.invars[saved:])

    def instead(operation, operands):
        if needed.isdisjoint(operation.outvars):
            return None
        late = [v not in needed for v in operation.outvars]
        split = operation.primitive.name == "scan" and any(late)
        pulled = [not hasattr(v, "val") and v in reached for v in operation.invars]
        return halved_loop(operation.params, operands, late, pulled) if split else None

    values = evaluated(jaxpr, closed.consts, jaxpr.eqns, arguments, instead=instead)
    return [value_of(v, values) for v in jaxpr.outvars]


def halved_loop(loop, operands, late, pulled):
    """The results of a scan by two: the second has what waits of each turn's results. loop: its
    parameters; late: of each result whether it waits, of what is carried ignored; pulled: of each
    operand whether it comes from a cotangent."""
    consts, carried = loop["num_consts"], loop["num_carry"]
    start, waits = consts + carried, [False] * carried + late[carried:]
    traced = loop["jaxpr"]
    body = jax.make_jaxpr(lambda *a: calls_opened(traced.jaxpr, traced.consts, a))(*traced.in_avals)
    ins, outs = body.jaxpr.invars, body.jaxpr.outvars
    sources = [v for k, v in enumerate(ins) if pulled[k] or consts <= k < start]
    first, second, handed = parted(body.jaxpr, waits, [*ins[:consts], *ins[start:]], sources)
    used = {v for operation in second for v in variables(operation.invars)}
    read = [k for k in range(start, len(ins)) if ins[k] in used]
    how = {name: loop[name] for name in ("length", "reverse", "unroll")}

    def now(carry, turn):
        values = evaluated(body.jaxpr, body.consts, first, [*operands[:consts], *carry, *turn])
        results = [value_of(v, values) for v, wait in zip(outs, waits, strict=True) if not wait]
        return results[:carried], (results[carried:], [values[v] for v in handed])

    def later(_, turn):
        known = dict(zip([*handed, *(ins[k] for k in read)], turn, strict=True))
        values = evaluated(body.jaxpr, body.consts, second, operands[:consts], known)
        return None, [value_of(v, values) for v, wait in zip(outs, waits, strict=True) if wait]

    carry, (early, handed_on) = lax.scan(now, operands[consts:start], operands[start:], **how)
    _, rest = lax.scan(later, None, [*handed_on, *(operands[k] for k in read)], **how)
    in_order = {True: iter(rest), False: iter([*carry, *early])}
    return [next(in_order[wait]) for wait in waits]


def variables(atoms):
    """The atoms that are variables and no literals."""
    return [v for v in atoms if not hasattr(v, "val")]


def needed_variables(jaxpr, results):
    """What these results of a jaxpr are computed from, they among it."""
    needed = set(variables(results))
    for operation in reversed(jaxpr.eqns):
        if not needed.isdisjoint(operation.outvars):
            needed.update(variables(operation.invars))
    return needed


def reached_variables(jaxpr, sources):
    """What is computed from these variables of a jaxpr, they among it."""
    reached = set(sources)
    for operation in jaxpr.eqns:
        if not reached.isdisjoint(variables(operation.invars)):
            reached.update(operation.outvars)
    return reached


def parted(jaxpr, waits, given, sources):
    """(operations of the first part, those of the second, variables handed on). waits: of each
    result whether it belongs to the second part; given: what that has beside what is handed on;
    sources: the cotangents. What does not come from these is recomputed: it is the first part's,
    with all it takes."""
    early, late = (
        [v for v, wait in zip(jaxpr.outvars, waits, strict=True) if wait is want]
        for want in (False, True)
    )
    needed, reached = needed_variables(jaxpr, early), reached_variables(jaxpr, sources)
    read = set(variables(late))
    second: list = []
    for operation in reversed(jaxpr.eqns):
        waiting = needed.isdisjoint(operation.outvars) and not reached.isdisjoint(operation.outvars)
        if not read.isdisjoint(operation.outvars) and (
            waiting or operation.primitive.name in REARRANGING
        ):
            second.insert(0, operation)
            read.update(variables(operation.invars))
    known = {*given, *jaxpr.constvars, *(v for operation in second for v in operation.outvars)}
    defined = [*jaxpr.invars, *(v for operation in jaxpr.eqns for v in operation.outvars)]
    handed = [v for v in defined if v in read and v not in known]
    needed = needed_variables(jaxpr, [*early, *handed])
    first = [operation for operation in jaxpr.eqns if not needed.isdisjoint(operation.outvars)]
    return first, second, handed
