"""Repeated blocks: what counts as the same work, what may enter from outside, and what is moved out
of the way first."""

from __future__ import annotations

import pytest

from planner.execution.loops import carried_tensors, loopable_blocks
from planner.graph.ir import Graph, Node, Tensor
from planner.graph.repeats import classes, find_runs, hoist


class Net:
    """Builds a chain of nodes over [8, 8] tensors."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.tensors = {"x": Tensor("x", (8, 8), "float32", "input")}
        self.weights: list[str] = []

    def weight(self, trained: bool = True) -> str:
        name = f"w{len(self.weights)}{'' if trained else '_frozen'}"
        self.tensors[name] = Tensor(name, (8, 8), "float32", "weight")
        self.weights.append(name)
        return name

    def add(self, op: str, *inputs: str) -> str:
        out = f"t{len(self.nodes)}"
        self.tensors[out] = Tensor(out, (8, 8), "float32")
        self.nodes.append(Node(f"n{len(self.nodes)}", op, inputs, (out,)))
        return out

    def graph(self) -> Graph:
        return Graph(
            "net",
            tuple(self.nodes),
            self.tensors,
            ("x",),
            self.nodes[-1].outputs,
            weights=dict.fromkeys(self.weights),
            labels={w: w for w in self.weights},
            trainable=frozenset(w for w in self.weights if "frozen" not in w),
        )

    def layer(self, x: str, extra: str = "") -> str:
        h = self.add("MatMul", x, self.weight())
        h = self.add("Relu", h)
        h = self.add("MatMul", h, self.weight())
        h = self.add("Add", h, extra) if extra else h
        return self.add("Add", h, x)


def test_plain_layers_fold():
    net = Net()
    x = net.add("MatMul", "x", net.weight())
    for _ in range(5):
        x = net.layer(x)
    assert find_runs(net.graph()) == ((1, 4, 5),)
    assert classes(net.graph(), ((1, 4, 5),))[-4:] == [1, 2, 3, 4]


@pytest.mark.parametrize("every", [2, 3, 4])
def test_layers_of_which_some_have_less_in_them_are_one_period(every: int):
    """As those of which one in four has no rotary embedding: nothing occurs there alone."""
    net = Net()
    x = net.add("MatMul", "x", net.weight())
    for k in range(4 * every):
        x = net.layer(x if k % every == every - 1 else net.add("Relu", x))
    ((_, period, repeats),) = find_runs(net.graph())
    assert (period, repeats) == (5 * every - 1, 4)


def test_layer_that_reads_data_is_not_one_that_reads_activations():
    # Its first product has no gradient of an operand to compute: pricing all repeats by it would
    # forget a third of their work.
    net, x = Net(), "x"
    for _ in range(5):
        x = net.layer(x)
    ((first, period, repeats),) = find_runs(net.graph())
    assert (first > 0, period, repeats) == (True, 4, 4)


def test_blocks_begin_where_the_least_is_handed_on() -> None:
    """An unlike first layer ends in the Add that the others end in too: blocks that began with it
    would hand on both of its operands instead of their sum."""
    net = Net()
    x = net.add("MatMul", "x", net.weight())
    x = net.add("Add", net.add("Neg", net.add("MatMul", x, net.weight())), x)
    for _ in range(4):
        x = net.layer(x)
    graph = net.graph()
    ((first, period, repeats),) = find_runs(graph)
    assert (first, period, repeats) == (4, 4, 4)
    assert carried_tensors(graph, ((first, period, repeats),)) == {graph.nodes[7].outputs[0]}


@pytest.mark.parametrize(("first", "runs"), [(1, 1), (3, 2)])
def test_layers_before_many_others_are_blocks_of_their_own(first: int, runs: int) -> None:
    """DeepSeek's three dense layers: recomputed, as the others are."""
    net = Net()
    x = net.add("MatMul", "x", net.weight())
    for _ in range(first):
        h = net.add("Neg", net.add("MatMul", net.add("MatMul", x, net.weight()), net.weight()))
        x = net.add("Add", net.add("MatMul", h, net.weight()), x)
    for _ in range(6):
        x = net.layer(x)
    assert len(find_runs(net.graph())) == runs


def test_a_first_layer_that_is_read_behind_the_blocks_stands_apart() -> None:
    """Exporters merge the same function of a condition, written in the first layer, with the one of
    the last layers: the layers between are blocks all the same."""
    net = Net()
    x = net.add("MatMul", "x", net.weight())
    merged = ""
    for _ in range(5):
        h = net.add("MatMul", x, net.weight())
        h = net.add("Relu", h)
        merged = merged or h
        h = net.add("MatMul", h, net.weight())
        x = net.add("Add", h, x)
    net.add("Mul", x, merged)
    graph = net.graph()
    assert find_runs(graph) == ((5, 4, 4),)
    assert carried_tensors(graph, ((5, 4, 4),))


def layered(net: Net, first: str, others: int) -> Graph:
    """One layer that ends with `first`, then so many that end with Relu, all the same before."""
    x = net.add("MatMul", "x", net.weight())
    for k in range(1 + others):
        h = x
        for op in ("Sin", "Cos", "Abs", "Neg", "Tanh"):
            h = net.add(op, net.add("MatMul", h, net.weight()))
        h = net.add("Relu" if k else first, h)
        x = net.add("Add", h, x)
    return net.graph()


def test_single_layer_before_others_like_it_is_a_run_of_one():
    # DeepSeek-V2's dense layer before those with experts: recomputed as the others are.
    graph = layered(Net(), "Exp", 4)
    assert find_runs(graph) == ((1, 12, 1), (13, 12, 4))
    lone, run = loopable_blocks(graph, find_runs(graph))
    assert carried_tensors(graph, (lone,)) == {graph.nodes[12].outputs[0]}
    assert run[2] == 4


def test_layer_whose_inside_is_read_elsewhere_is_no_run():
    net = Net()
    graph = layered(net, "Exp", 4)
    inside = graph.nodes[11].outputs[0]  # of the first layer: read behind all others
    net.add("Add", inside, graph.nodes[-1].outputs[0])
    assert find_runs(net.graph()) == ((13, 12, 4),)


def test_value_made_inside_a_run_is_not_shared_by_it():
    # Every layer adds the same tensor, made half way through the first layer that does: no block
    # can be handed it from outside.
    net = Net()
    x = net.add("MatMul", "x", net.weight())
    same = ""
    for _ in range(6):
        h = net.add("MatMul", x, net.weight())
        h = net.add("Relu", h)
        same = same or h
        h = net.add("MatMul", h, net.weight())
        h = net.add("Add", h, same)
        x = net.add("Add", h, x)
    graph = net.graph()
    runs = find_runs(graph)
    assert runs
    for first, period, repeats in runs:
        for node in graph.nodes[first : first + period * repeats]:
            assert same not in node.inputs or graph.producer[same] < first


def test_shared_value_made_before_a_run_is_fine():
    net = Net()
    x = net.add("MatMul", "x", net.weight())
    same = net.add("Relu", x)
    for _ in range(4):
        x = net.layer(x, same)
    assert find_runs(net.graph()) == ((2, 5, 4),)


def test_weights_used_by_every_layer_fold():
    net = Net()
    w, x = net.weight(), net.add("MatMul", "x", net.weight())
    for _ in range(4):
        h = net.add("Relu", net.add("MatMul", x, w))
        x = net.add("Add", net.add("MatMul", h, w), x)
    assert find_runs(net.graph()) == ((1, 4, 4),)


def test_frozen_work_of_one_layer_stays_in_it():
    net = Net()
    x = net.add("MatMul", "x", net.weight())
    table = net.weight(trained=False)
    for _ in range(4):
        decay = net.add("Exp", net.weight(trained=False))  # of this layer alone
        mask = net.add("Relu", table)  # the same for all, but each reads its own copy
        x = net.layer(net.add("Mul", net.add("Mul", x, decay), mask))
    graph = hoist(net.graph())
    assert [n.op for n in graph.nodes] == [n.op for n in net.nodes]
    ((_, period, repeats),) = find_runs(graph)
    assert (period, repeats) == (8, 4)


def test_shared_frozen_work_is_hoisted_in_order():
    net = Net()
    x = net.add("MatMul", "x", net.weight())
    table = net.add("Relu", net.add("Exp", net.weight(trained=False)))
    for _ in range(3):
        x = net.layer(x, table)
    graph = hoist(net.graph())
    assert [n.op for n in graph.nodes[:3]] == ["Exp", "Relu", "MatMul"]
    made: set[str] = set()
    for node in graph.nodes:
        assert all(n in made for n in node.inputs if n in graph.producer)
        made.update(node.outputs)
