"""Names of variables: what they are taken from, and that renaming changes no value."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import models_zoo
from planner.emit.local_names import given_name, local_names, renamed, weight_name
from planner.graph.repeats import find_runs, hoist
from planner.reader import read_model
from planner.workload.loss import add_loss


def test_values_of_a_block_go_by_what_they_are() -> None:
    graph = hoist(add_loss(read_model(models_zoo.build("zoo:llama-tiny"), batch=8)))
    names = local_names(graph, find_runs(graph))
    attention = next(
        node for node in graph.nodes if len(node.outputs) == 1 and "Attention" in node.op
    )
    assert [names[t] for t in attention.inputs[:3]] == ["q", "k", "v"]
    assert names[attention.outputs[0]] == "context" and names[graph.outputs[0]] == "loss"
    made = {node.id.rpartition("/layers.0/")[2]: names[node.outputs[0]] for node in graph.nodes}
    assert made["self_attn/q_proj/MatMul"] == made["self_attn/q_proj/Transpose"] == "q"
    assert made["mlp/gate_proj/MatMul"] == "mlp_gate" and made["mlp/Mul"] == "mlp_act"
    assert local_names(graph, ())["/model/layers.0/mlp/Mul_output_0"] == "mlp"
    assert made["input_layernorm/RMSNormalization"] == "input_layernorm" and made["Add"] == "x"
    assert weight_name("model.layers.3.mlp.up_proj.weight") == "up_proj_weight"
    assert given_name("/model/rotary_emb/Cos_output_0") == "cos" and given_name("a b") == "const"


@given(st.text(), st.text())
def test_names_are_plain_words_whatever_a_model_says(one: str, other: str) -> None:
    for name in (weight_name(f"{one}.{other}"), given_name(one), given_name(f"{other}_output_0")):
        assert name.isascii() and name.isidentifier() and name == name.lower() and len(name) <= 32


TOLD = {f"t{i}": stem for i, stem in enumerate(["h", "h", "h", "x", "sum", "w", "class"])}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (  # a value takes the name of one that is read for the last time
            "def f(t0):\n    t1 = t0 + 1\n    t2 = t1 * 2\n    return t2",
            "def f(h):\n    h = h + 1\n    h = h * 2\n    return h",
        ),
        (  # one that is still read keeps it
            "def f(t0):\n    t1 = t0 + 1\n    t2 = t1 * t0\n    return t2, t1",
            "def f(h):\n    h2 = h + 1\n    h = h2 * h\n    return h, h2",
        ),
        (  # what a lambda reads from around it is not its argument
            "def f(t3):\n    t0 = g(lambda x: x + t3)\n    return t0",
            "def f(x2):\n    h = g(lambda x: x + x2)\n    return h",
        ),
        (  # an argument of a lambda that reads nothing from around it is no obstacle
            "def f(t3):\n    t3b = g(lambda x: x)(t3)\n    return t3b",
            "def f(x):\n    t3b = g(lambda x: x)(x)\n    return t3b",
        ),
        (  # a lambda's argument may be called as a variable around it
            "def f(t0, t3):\n    t1 = g(lambda t3: t3 + 1)(t0)\n    return t1 + t3",
            "def f(h, x):\n    h = g(lambda t3: t3 + 1)(h)\n    return h + x",
        ),
        (  # a function inside reads later what it names
            "def f(t0):\n    def g(t1):\n        return t1 + t0\n    t2 = g(t0)\n    return g(t2)",
            "def f(h):\n    def g(h2):\n        return h2 + h\n    h2 = g(h)\n    return g(h2)",
        ),
        (  # the next turn of a loop reads what this one must not change
            "def f(t0):\n    for i in range(3):\n        t1 = g(t0)\n    return t1",
            "def f(h):\n    for i in range(3):\n        h2 = g(h)\n    return h2",
        ),
        (  # words of Python and of the runtime stay theirs
            "def f(t4):\n    t6 = t4 + 1\n    return t6",
            "def f(sum_):\n    class_ = sum_ + 1\n    return class_",
        ),
        (  # a global that is read is not hidden
            "def f(t3):\n    t5 = x + t3\n    return t5 + w",
            "def f(x2):\n    w2 = x + x2\n    return w2 + w",
        ),
        (  # strings and comments are nobody's variables
            'def f(t0):\n    """Carries t0."""\n    return t0["t0"]  # t0',
            'def f(h):\n    """Carries h."""\n    return h["t0"]  # t0',
        ),
    ],
)
def test_renaming(before: str, after: str) -> None:
    assert renamed(before, TOLD) == after


@given(st.data())
def test_a_renamed_function_gives_what_it_gave(data: st.DataObject) -> None:
    """Random straight code in which each variable is assigned once."""
    stems = data.draw(
        st.lists(st.sampled_from(["x", "h", "q", "if", "take"]), min_size=3, max_size=9)
    )
    lines, known = ["def f(t0, t1):"], ["t0", "t1"]
    for i in range(2, len(stems)):
        a, b = (data.draw(st.sampled_from(known)) for _ in range(2))
        form = data.draw(
            st.sampled_from(["{a} + 2 * {b}", "(lambda x: x - {a})({b})", "own({a}, {b})"])
        )
        if "own" in form:
            lines += [
                f"    def own{i}(t90, t91):",
                f"        t92 = t90 * 3 + {a}",
                "        return t92 - t91",
            ]
            form = form.replace("own", f"own{i}")
        lines.append(f"    t{i} = {form.format(a=a, b=b)}")
        known.append(f"t{i}")
    lines.append(
        f"    return {', '.join(data.draw(st.lists(st.sampled_from(known), min_size=1)))},"
    )
    told = {f"t{i}": stem for i, stem in enumerate(stems)} | {"t90": "x", "t91": "h", "t92": "x"}
    text = "\n".join(lines)
    results = []
    for source in (text, renamed(text, told)):
        space: dict[str, Any] = {}
        exec(source, space)
        results.append(space["f"](5, 7))
    assert results[0] == results[1]
