"""A loss of the user's own: `FILE.py:function`, written with jax.numpy, taken into the emitted
program as it is written.

The function takes the output that the loss reads, then anything else it names: outputs and inputs
of the graph by their names, `labels` (int32, one per row of the output, without its last dim) and
`targets` (like the output). Every argument has the batch in dim 0. It returns one value a sample
(or an array whose first dim is the batch); the loss is the mean of all. So it may be computed on
any piece of the batch, and planning need not run it.

The file is read, never executed: only the emitted program runs it. So its price is that of a usual
loss (planner.ops.loss: passes over what it reads, float32 arrays it holds); products in it have no
price, and `priced` says so wherever a plan is shown.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from costmodels.hardware.intake import read_text
from planner.errors import PlanError, did_you_mean

MOST_BYTES = 1 << 20
PRODUCTS = frozenset(
    {
        "dot",
        "matmul",
        "einsum",
        "tensordot",
        "vdot",
        "inner",
        "outer",
        "dot_general",
        "conv",
        "conv_general_dilated",
        "convolve",
    }
)
"""Functions whose work grows faster than what they read."""


@dataclass(frozen=True)
class UserLoss:
    """A function of a file. arguments: names of its parameters; source: the whole file without
    `from __future__` imports."""

    function: str
    arguments: tuple[str, ...]
    source: str


def is_user_loss(loss: str) -> bool:
    """Whether a value of --loss means a function in a file."""
    return loss.rpartition(":")[0].endswith(".py")


def read_user_loss(loss: str) -> UserLoss:
    """The function that `FILE.py:function` names. Raises PlanError when there is none, or it cannot
    be called as the module says."""
    file, _, name = loss.rpartition(":")
    try:
        text = read_text(file, MOST_BYTES)
        tree = ast.parse(text)
    except (OSError, ValueError) as error:
        raise PlanError(
            "P038", f"--loss {loss}: {file!r} cannot be read", detail=[str(error)[:200]]
        ) from None
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise PlanError(
            "P038",
            f"--loss {loss}: {file!r} is not Python",
            detail=[f"line {getattr(error, 'lineno', '?')}: {str(error)[:200]}"],
        ) from None
    functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    if name not in functions:
        near = did_you_mean(name, list(functions))
        raise PlanError(
            "P038",
            f"--loss {loss}: {file!r} defines no function {name!r}",
            help=[near or "FILE.py:function, a plain function at the top level"],
        )
    a = functions[name].args
    names = tuple(x.arg for x in (*a.posonlyargs, *a.args))
    if a.vararg or a.kwarg or a.kwonlyargs or a.defaults or not names:
        raise PlanError(
            "P038",
            f"--loss {loss}: {name!r} must take plain arguments: the output, then outputs, inputs,"
            " labels or targets by name",
        )
    stars = any(
        isinstance(n, ast.ImportFrom) and any(x.name == "*" for x in n.names)
        for n in ast.walk(tree)
    )
    if stars:
        raise PlanError(
            "P038",
            f"--loss {loss}: {file!r} imports with a star, which a program cannot take in",
            help=["import the names that are used"],
        )
    return UserLoss(name, names, _without_future(text, tree))


def priced(loss: str) -> str:
    """How a user's loss is priced, in words for the assumptions of a plan; where the file
    multiplies matrices, that this has no price."""
    from planner.ops.loss import USER_BYTES, USER_PASSES

    user_loss = read_user_loss(loss)
    text = read_text(loss.rpartition(":")[0], MOST_BYTES)
    lines = sorted(
        {n.lineno for n in ast.walk(ast.parse(text)) if isinstance(n, ast.expr) and _is_product(n)}
    )
    sentence = (
        f"loss {user_loss.function} is not run to be priced: {USER_PASSES} passes over what it"
        f" reads, {USER_BYTES} bytes a value of the output held"
    )
    return sentence + (
        f"; its matrix products (line {', '.join(map(str, lines[:3]))}) have no price"
        if lines
        else ""
    )


def _is_product(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.MatMult)
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    return (
        called.attr
        if isinstance(called, ast.Attribute)
        else called.id
        if isinstance(called, ast.Name)
        else ""
    ) in PRODUCTS


def _without_future(text: str, tree: ast.Module) -> str:
    """The text without `from __future__` lines, which may only stand at the top of a program."""
    lines = text.splitlines()
    gone = {
        k
        for n in tree.body
        if isinstance(n, ast.ImportFrom) and n.module == "__future__"
        for k in range(n.lineno - 1, n.end_lineno or n.lineno)
    }
    return "\n".join(line for k, line in enumerate(lines) if k not in gone).strip("\n")
