"""Weights that a model casts to another float type before it uses them, as exports under autocast
and JAX functions with parameters in float32 do.

A plan's precision says what weights are computed in, so that such a cast says nothing. Left in, it
would be an operation between a weight and its product: the gradient would be summed there, and no
ZeRO stage could cut the weight.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.reader.draft.draft import Draft, Op
from planner.reader.draft.simplify import users
from planner.reader.onnx.params import TRAINABLE, parameter_uses

_VIEWS = ("Transpose", "Reshape", "Identity")


def drop_weight_casts(draft: Draft) -> None:
    """Let what reads a cast weight, or a cast view of one, read the weight itself. A weight that is
    read in another type as well gets a second name, which `resolve_ties` joins again."""
    casts = [
        op for op in draft.ops if op.op == "Cast" and str(op.attrs["to"]) in TRAINABLE
    ]  # most models have none
    if not casts:
        return
    readers = users(draft)
    instead: dict[Op, list[Op]] = {}
    for leaf in dict.fromkeys(use.leaf for use in parameter_uses(draft)):
        paths, elsewhere = _paths_to_casts(readers, leaf, draft.outputs)
        kinds = {str(path[-1].attrs["to"]) for path in paths}
        if not elsewhere and len(kinds) == 1:
            (kind,) = kinds
            for name in {leaf, *(op.outputs[0] for path in paths for op in path)}:
                draft.types[name] = draft.shape(name), kind
            for path in paths:
                _rename(readers, path[-1].outputs[0], path[-1].inputs[0])
                instead[path[-1]] = []
        elif leaf in draft.refs and len(draft.shape(leaf)) > 1:
            for kind in sorted(kinds):
                of_kind = [path for path in paths if path[-1].attrs["to"] == kind]
                instead |= _read_apart(draft, readers, leaf, kind, of_kind)
    draft.ops = [new for op in draft.ops for new in instead.get(op, [op])]
    draft.maker = {o: op for op in draft.ops for o in op.outputs if o}


def _paths_to_casts(
    readers: dict[str, list[Op]], leaf: str, results: Sequence[str]
) -> tuple[list[tuple[Op, ...]], bool]:
    """The paths from a leaf through views to a cast to another float type, each with the cast at
    its end, and whether it is read otherwise, too. results: the model's, which keep their names."""
    paths, elsewhere = list[tuple[Op, ...]](), False
    stack: list[tuple[str, tuple[Op, ...]]] = [(leaf, ())]
    while stack:
        name, views = stack.pop()
        for op in readers.get(name, ()):
            if op.outputs and op.outputs[0] in results:
                elsewhere = True
            elif op.op == "Cast" and str(op.attrs["to"]) in TRAINABLE:
                paths.append((*views, op))
            elif op.op in _VIEWS and op.inputs[0] == name:
                stack.append((op.outputs[0], (*views, op)))
            else:
                elsewhere = True
    return paths, elsewhere


def _rename(readers: dict[str, list[Op]], old: str, new: str) -> None:
    """Let the readers of a tensor read another one."""
    for op in readers.get(old, ()):
        op.inputs[:] = [new if name == old else name for name in op.inputs]
    readers[new] = [*readers.get(new, ()), *readers.pop(old, ())]


def _read_apart(
    draft: Draft, readers: dict[str, list[Op]], leaf: str, kind: str, paths: list[tuple[Op, ...]]
) -> dict[Op, list[Op]]:
    """Let what reads casts of a leaf to one type read views of the leaf under a second name, of
    that type. What takes the place of each cast."""
    copy = draft.fresh(leaf)
    draft.types[copy], draft.refs[copy] = (draft.shape(leaf), kind), draft.refs[leaf]
    draft.copy_of[copy] = leaf
    instead: dict[Op, list[Op]] = {}
    for *views, cast in paths:
        name, views_of_copy = copy, list[Op]()
        for view in views:
            fresh = draft.fresh(view.outputs[0])
            draft.types[fresh] = draft.shape(view.outputs[0]), kind
            inputs, number = [name, *view.inputs[1:]], f"{cast.id}/{view.id}"
            views_of_copy.append(Op(view.op, inputs, [fresh], dict(view.attrs), number))
            name = fresh
        _rename(readers, cast.outputs[0], name)
        instead[cast] = views_of_copy
    return instead
