"""Names of a function's variables: what its values are, in the words of the model.

Bodies are written with variables that are numbered through (t1, t2 ...), each assigned once.
`local_names` says what each tensor is called: as recompute policies call it (q, k, v, context,
mlp_up ...), or the module that made it, or the operator. `renamed` gives a function's variables
these names. A value takes the variable of one that nothing reads any more, as people write it
(q = q.reshape(...)); of values of one name that live at the same time the later are numbered.

Nothing of a model's names reaches the source but plain lower-case words of bounded length.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod

from planner.emit.runtime import paths
from planner.emit.source import IMPORTS, defined_in
from planner.execution.block_values import Runs, block_values
from planner.graph.ir import Graph, Node
from planner.ops import operator_of

GENERATED = re.compile(r"[a-z]+\d+")
WORD = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
LONGEST = 32
MADE_BY_MODULE = frozenset({"product", "norm", "lookup", "convolution", "recurrent", "experts"})
"""Kinds of operators whose results go by the module that holds their weights."""


def local_names(graph: Graph, runs: Runs) -> Mapping[str, str]:
    """Tensor that a node makes -> what a variable that holds it is called. runs: the repeated
    blocks, whose values go by the names that recompute policies have for them."""
    key = ("local names", runs)
    if key not in graph.memo:
        names: dict[str, str] = {}
        for tensor, name in block_values(graph, runs).items():
            if name != "norm":  # a norm's module says which
                _call(graph, names, tensor, name)
        for node in graph.nodes:
            kind = operator_of(node.op).kind
            if kind == "attention":
                for name, tensor in zip(("q", "k", "v"), node.inputs, strict=False):
                    _call(graph, names, tensor, name)
                names.setdefault(node.outputs[0], "context")
            elif kind == "loss":
                _call(graph, names, node.inputs[0], "logits")
                names[node.outputs[0]] = "loss"
        for node in graph.nodes:
            for tensor in node.outputs:
                names.setdefault(tensor, _name(graph, names, node))
        graph.memo[key] = names
    known: Mapping[str, str] = graph.memo[key]
    return known


def weight_name(label: str) -> str:
    """What a variable that holds a weight is called."""
    return _short([part for part in label.split(".") if not part.isdigit()][-2:]) or "weight"


def given_name(tensor: str) -> str:
    """What a variable that holds an input or a constant is called."""
    folded = re.search(r"([A-Z][A-Za-z]*)(_\d+)?_output_\d+$", tensor)
    return _word(folded[1]) if folded else _short([tensor]) or "const"


def _call(graph: Graph, names: dict[str, str], tensor: str, name: str) -> None:
    """Call a tensor by a name, and with it what it was rearranged, rotated or moved from, back to
    the product that made it."""
    while tensor in graph.producer and tensor not in names:
        names[tensor] = name
        node = graph.nodes[graph.producer[tensor]]
        if operator_of(node.op).kind:
            return
        operands = [n for n in node.inputs if n in graph.producer]
        if not operands or _elements(graph, operands[0]) != _elements(graph, tensor):
            return
        if len({i for i, _ in graph.consumers[operands[0]]}) > 1:
            return
        tensor = operands[0]


def _elements(graph: Graph, tensor: str) -> int:
    return prod(graph.tensors[tensor].shape)


def _name(graph: Graph, names: Mapping[str, str], node: Node) -> str:
    """What the result of a node is called, whose operands have names."""
    operator = operator_of(node.op)
    operand_names = [names[n] for n in node.inputs if n in names]
    parts = node.scope.split(".") if node.scope else []
    module = _short(_inside(parts))
    if operator.kind in MADE_BY_MODULE:
        return module or _word(node.op)
    alone = (
        len(operand_names) == 1 and len([n for n in node.inputs if n]) > 1
    )  # a bias, a factor, a shape
    if operand_names and (operator.free or operator.rearranges or operator.passes_values or alone):
        return operand_names[0]
    if len(operand_names) > 1 and (len(parts) == 1 or (parts and parts[-1].isdigit())):
        return "x"  # of a block itself, or the model: what is added to what goes through it
    return module if len(operand_names) > 1 and module else _word(node.op)


def _inside(parts: list[str]) -> list[str]:
    """The parts of a module's path inside the innermost repeated one; the last of a path that has
    none."""
    numbered = [i for i, part in enumerate(parts) if part.isdigit()]
    inside = parts[numbered[-1] + 1 :] if numbered else parts[-1:]
    return inside[-2:]


def _short(parts: list[str]) -> str:
    plain = [_snake(p) for p in parts if WORD.fullmatch(p)]
    name = "_".join(plain)
    return name if len(name) <= LONGEST else plain[-1][:LONGEST].rstrip("_")  # the module alone


def _word(op: str) -> str:
    """An operator's name as that of a variable."""
    plain = _snake(op.rpartition(":")[2])
    return plain if WORD.fullmatch(plain) and len(plain) <= LONGEST else "value"


def _snake(word: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", word).lower()


@cache
def _reserved() -> frozenset[str]:
    """Names that mean something to the functions of the runtime, or to Python."""
    runtime = {name for file in paths() for name in defined_in(file)}
    return frozenset({*runtime, *IMPORTS, *keyword.kwlist, *keyword.softkwlist, *dir(builtins)})


def renamed(text: str, stems: Mapping[str, str]) -> str:
    """A function's source with its generated variables under names. stems: variable -> the name
    that it should have; variables without one stay as they are."""
    tree = ast.parse(text)
    lines = text.split("\n")
    edits: dict[int, list[tuple[int, str, str]]] = {}
    for function in tree.body:
        assert isinstance(function, ast.FunctionDef)
        for row, column, old, new in _Scope(function, stems).edits():
            edits.setdefault(row - 1, []).append((column, old, new))
    for number, changes in edits.items():
        for column, old, new in sorted(changes, reverse=True):
            line = lines[number]
            lines[number] = f"{line[:column]}{new}{line[column + len(old) :]}"
    return "\n".join(lines)


@dataclass
class _Scope:
    """A function whose variables are renamed; functions inside it are scopes of their own.

    taken: names that stand for something in the functions around it. given: what variables of these
    are called.
    """

    function: ast.FunctionDef
    stems: Mapping[str, str]
    taken: frozenset[str] = frozenset()
    given: Mapping[str, str] = field(default_factory=dict)

    def edits(self) -> Iterator[tuple[int, int, str, str]]:
        """(line from 1, column, what is there, what is to be there) of every change."""
        body = self.function.body
        reads = [_loads(s) for s in body]
        last = {name: k for k, names in enumerate(reads) for name in names}
        read_later = {
            n for s in body for n in _read_from_around(s)
        }  # read by what may be called later
        fixed, bound = self._fixed()
        holder, new_names = dict[str, tuple[str, int]](), dict[str, str]()

        def take(variable: str, place: int, until: int) -> None:
            """Name what is assigned in statement `place`, over what is not read after `until`."""
            if variable in new_names or variable not in self.stems:
                return
            stem = self.stems[variable]
            stem = f"{stem}_" if stem in _reserved() else stem
            hidden = bound if variable in read_later else frozenset()
            for number in range(1, len(self.stems) + 2):
                name = stem if number == 1 else f"{stem}{number}"
                before, assigned_at = holder.get(name, ("", place - 1))
                is_free = (
                    assigned_at < place
                    and before not in read_later
                    and last.get(before, -1) <= until
                )
                if is_free and name not in fixed and name not in hidden:
                    new_names[variable], holder[name] = name, (variable, place)
                    return

        for argument in _arguments(self.function):
            take(argument.arg, -1, -1)
        for k, statement in enumerate(body):
            repeats = isinstance(statement, ast.For)  # runs after what it reads is read
            for variable in _stores(statement):
                take(variable, k, k - repeats)
        names = dict(self.given)
        names |= new_names
        for argument in _arguments(self.function):
            if argument.arg in new_names:
                yield argument.lineno, argument.col_offset, argument.arg, new_names[argument.arg]
        yield from self._docstring(new_names)
        for statement in body:
            if isinstance(statement, ast.FunctionDef):
                if (old := statement.name) in new_names:
                    yield statement.lineno, statement.col_offset + 4, old, new_names[old]
                taken = frozenset({*fixed, *names.values()} & _names(statement, names))
                yield from _Scope(statement, self.stems, taken, names).edits()
                continue
            for node in _own_names(statement):
                if node.id in names:
                    yield node.lineno, node.col_offset, node.id, names[node.id]

    def _fixed(self) -> tuple[frozenset[str], frozenset[str]]:
        """(names that variables cannot have here, as they stand for something else; names of
        arguments inside expressions, which hide variables from what is read there)."""
        free, bound = set[str](), set[str]()

        def walk(node: ast.AST, hidden: frozenset[str]) -> None:
            if isinstance(node, ast.Name) and node.id not in hidden:
                free.add(node.id)
            elif isinstance(node, ast.arg):
                free.add(node.arg)
            if isinstance(node, ast.FunctionDef):
                free.add(node.name)
            mine = _bound(node)
            bound.update(mine)
            for child in ast.iter_child_nodes(node):
                if not (isinstance(node, ast.Lambda) and isinstance(child, ast.arguments)):
                    walk(child, hidden | mine)

        walk(self.function, frozenset())
        return frozenset({n for n in free if n not in self.stems} | self.taken), frozenset(bound)

    def _docstring(self, new_names: Mapping[str, str]) -> Iterator[tuple[int, int, str, str]]:
        first = self.function.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            for match in GENERATED.finditer(str(first.value.value)):
                if match[0] in new_names and first.lineno == first.end_lineno:
                    yield (
                        first.lineno,
                        first.col_offset + 3 + match.start(),
                        match[0],
                        new_names[match[0]],
                    )


def _own_names(node: ast.AST, hidden: frozenset[str] = frozenset()) -> Iterator[ast.Name]:
    """Names in a statement but for those that a lambda's arguments hide: an argument may be called
    as a variable around it is."""
    if isinstance(node, ast.Name):
        if node.id not in hidden:
            yield node
        return
    hidden |= _bound(node) if isinstance(node, ast.Lambda) else frozenset()
    for child in ast.iter_child_nodes(node):
        yield from _own_names(child, hidden)


def _bound(node: ast.AST) -> frozenset[str]:
    """Names that an expression gives to its own arguments."""
    if isinstance(node, ast.Lambda):
        return frozenset(a.arg for a in node.args.args)
    parts = getattr(node, "generators", ())
    return frozenset(
        n.id for part in parts for n in ast.walk(part.target) if isinstance(n, ast.Name)
    )


def _arguments(function: ast.FunctionDef) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def _loads(statement: ast.stmt) -> set[str]:
    return {
        n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
    }


def _stores(statement: ast.stmt) -> list[str]:
    """Variables that a statement assigns, in the order of the text; of a function its name."""
    if isinstance(statement, ast.FunctionDef):
        return [statement.name]
    names = [
        n for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    ]
    return [n.id for n in sorted(names, key=lambda n: (n.lineno, n.col_offset))]


def _read_from_around(statement: ast.stmt) -> set[str]:
    """Variables that functions and expressions with arguments inside a statement read from around
    them."""
    read_around: set[str] = set()
    for node in ast.walk(statement):
        if mine := _bound(node):
            read_around |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - mine
        elif isinstance(node, ast.FunctionDef):
            bound_inside = {a.arg for a in _arguments(node)}
            bound_inside |= {n for s in node.body for n in _stores(s)}
            read_around |= {n for s in node.body for n in _loads(s)} - bound_inside
    return read_around


def _names(function: ast.FunctionDef, names: Mapping[str, str]) -> set[str]:
    """What a function inside reads from around it, as it is called there."""
    return {names.get(n, n) for n in _read_from_around(function)}
