"""What trains: slots, globs, ties, adapters; and that what does not train costs nothing, in the
price and in the program."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest

from planner.api import plan
from planner.cli import main
from planner.emit.from_strategy import program
from planner.errors import PlanError
from planner.graph.ir import Graph
from planner.reader import read_model
from planner.report.parameters import parameter_table
from planner.verify.numerics import Twin, compare, load_program, seeded_values
from planner.workload.open import open_model
from planner.workload.train_eval_mode import training
from planner.workload.trainable import choose
from planner.workload.weights import load
from tests.reader.reader_models import model, rand, same

GPT = "zoo:gpt-tiny"
MACHINE: dict = {
    "devices": 8,
    "hardware": "cpu",
    "precision": "fp32",
    "batch": 16,
    "baselines": False,
}


def trained(graph: Graph) -> set[str]:
    return {graph.labels[n] for n in graph.trainable}


# slots


def test_mamba_trains_its_convolution_bias_a_and_d() -> None:
    graph = open_model("zoo:ssm-tiny", 1).plain
    assert len(graph.trainable) == len(graph.weights)
    assert {
        f"backbone.layers.1.mixer.{n}" for n in ("conv1d.x.bias", "A_log", "D", "dt_bias")
    } <= trained(graph)


def test_what_bounds_a_parameter_does_not_hide_it_and_masks_stay_constant() -> None:
    made = model(
        "(float[2,3,8] x) => (float[2,3,8] y) { e = Exp(a) n = Neg(e) h = Mul(x, n) m = Mul(h,"
        " mask) y = Add(m, table) }",
        a=rand(8),
        mask=np.tri(3, 8, dtype=np.float32),
        table=rand(3, 8),
    )
    assert trained(read_model(made)) == {"a"}


GRU = (
    "h = Transpose <perm = [1, 0, 2]> (x) o, l = GRU <hidden_size = 4, linear_before_reset = 1> (h,"
    " W, R, B) p = Squeeze(l, zero) y = MatMul(p, head)"
)
ORDER = {"r": (0, 4), "z": (4, 8), "n": (8, 12)}  # torch's order; ONNX's is z, r, n


def cut(what: str) -> str:
    """A stored gate matrix or vector put into ONNX's order."""
    parts = " ".join(
        f"{what}_{g} = Slice({what}, at{lo}, at{hi}, zero)" for g, (lo, hi) in ORDER.items()
    )
    return f"{parts} {what}_all = Concat <axis = 0> ({what}_z, {what}_r, {what}_n)"


def test_recurrent_weights_that_an_exporter_put_in_order_train_as_they_are_stored() -> None:
    short = {"wi": rand(12, 3), "wh": rand(12, 4), "bi": rand(12), "bh": rand(12, seed=1)}
    head, zero = rand(4, 5), np.array([0])
    at = {f"at{n}": np.array([n]) for n in (0, 4, 8, 12)}
    ordered = (
        f"{' '.join(map(cut, short))} b_all = Concat <axis = 0> (bi_all, bh_all) W ="
        " Unsqueeze(wi_all, zero) R = Unsqueeze(wh_all, zero) B = Unsqueeze(b_all, zero)"
    )
    made = model(
        f"(float[2,6,3] x) => (float[2,5] y) {{ {ordered} {GRU} }}",
        head=head,
        zero=zero,
        **at,
        **short,
    )
    graph = same(made, {"x": rand(2, 6, 3)})
    assert graph.trainable == {"wi", "wh", "bi", "bh", "head"} and not any(
        "not trained" in n for n in graph.notes
    )

    rows = np.r_[4:8, 0:4, 8:12]
    both = np.concatenate([short["bi"][rows], short["bh"][rows]])[None]
    plain = model(
        f"(float[2,6,3] x) => (float[2,5] y) {{ {GRU} }}",
        head=head,
        zero=zero,
        W=short["wi"][rows][None],
        R=short["wh"][rows][None],
        B=both,
    )
    mine, theirs = gradients(made), gradients(plain)
    for name, whole in (
        ("wi", theirs["W"][0]),
        ("wh", theirs["R"][0]),
        ("bi", theirs["B"][0, :12]),
        ("bh", theirs["B"][0, 12:]),
    ):
        assert np.abs(mine[name]).max() > 0 and np.allclose(mine[name][rows], whole, atol=1e-6)


def gradients(made: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Of every trained weight by its label, of the unsharded program at one batch."""
    opened = open_model(made, 1, loss="mse")
    graph = opened.graph(1)
    feeds = {n: rand(*graph.tensors[n].shape) for n in graph.inputs}
    return Twin(graph, "train", seeded_values(graph, load(graph, None))).gradients(feeds, 1)[1]


def test_parts_of_packed_projections_train_the_whole() -> None:
    text = (
        "q = Slice(w, zero, eight, zero) k = Slice(w, eight, sixteen, zero) q1 = Transpose(q) k1 ="
        " Transpose(k) a = MatMul(x, q1) b = MatMul(x, k1) y = Add(a, b)"
    )
    bounds = {"zero": np.array([0]), "eight": np.array([8]), "sixteen": np.array([16])}
    graph = same(
        model(f"(float[2,3,8] x) => (float[2,3,8] y) {{ {text} }}", w=rand(16, 8), **bounds),
        {"x": rand(2, 3, 8)},
    )
    assert graph.trainable == {"w"}


TOKENS = "c = Expand(cls_token, shape) j = Concat <axis = 1> (c, x) y = Add(j, table)"


def tokens(table: str) -> Graph:
    made = model(
        f"(float[2,3,8] x) => (float[2,4,8] y) {{ {TOKENS.replace('table', 'TABLE')} }}",
        cls_token=rand(1, 1, 8),
        TABLE=rand(1, 4, 8),
        shape=np.array([2, 1, 8]),
    )
    for tensor in made.graph.initializer:
        tensor.name = table if tensor.name == "TABLE" else tensor.name
    made.graph.node[-1].input[1] = table
    return same(made, {"x": rand(2, 3, 8)})


def recorded(made: onnx.ModelProto, name: str, key: str, value: str) -> None:
    """An exporter's record on an initializer."""
    entry = made.graph.value_info.add(
        name=name, type=onnx.helper.make_tensor_type_proto(1, None)
    ).metadata_props.add()
    entry.key, entry.value = key, value


@pytest.mark.parametrize(
    "name",
    [
        "pos_embed",
        "vit.embeddings.position_embeddings",
        "encoder.pos_embedding",
        "abs_pos_emb",
        "model.positional_embedding",
        "layers.0.rel_pos_bias",
    ],
)
def test_what_modules_call_their_tables_trains_without_a_slot(name: str) -> None:
    assert tokens(name).trainable == {"cls_token", name}


def test_the_exporter_s_record_decides_before_the_name() -> None:
    key = "pkg.torch.export.graph_signature.InputSpec.kind"
    for name, kind, trains in (
        ("anything", "PARAMETER", True),
        ("anything", "BUFFER", False),
        ("pos_embed", "BUFFER", False),
        ("anything", "", False),
    ):
        file = model(
            f"(float[2,4,8] x) => (float[2,4,8] y) {{ h = MatMul(x, w) y = Add(h, {name}) }}",
            w=rand(8, 8),
            **{name: rand(1, 4, 8)},
        )
        if kind:
            recorded(file, name, key, kind)
        assert (name in read_model(file).trainable) == trains, (name, kind)


def test_a_buffer_in_a_parameter_s_slot_is_not_trained() -> None:
    made = model(
        "(float[2,8] x) => (float[2,8] y) { s = Add(x, b) y = MatMul(s, w) }",
        w=rand(8, 8),
        b=rand(8),
    )
    recorded(made, "b", "pkg.torch.export.graph_signature.InputSpec.kind", "BUFFER")
    assert read_model(made).trainable == {"w"}


def test_temperatures_train_and_no_pattern_takes_them_for_constants() -> None:
    text = (
        "q = MatMul(x, wq) k = MatMul(x, wk) t = Transpose <perm = [0, 2, 1]> (k) s = MatMul(q, t)"
        " e = Exp(logit_scale) m = Mul(s, e) p = Softmax <axis = -1> (m)"
    )
    made = model(
        f"(float[2,3,8] x) => (float[2,3,8] y) {{ {text} y = MatMul(p, x) }}",
        wq=rand(8, 8) / 9,
        wk=rand(8, 8) / 9,
        logit_scale=np.float32(0.5),
    )
    graph = same(made, {"x": rand(2, 3, 8)})
    assert graph.trainable == {"wq", "wk", "logit_scale"}
    assert np.abs(gradients(made)["logit_scale"]).max() > 0


@pytest.mark.parametrize("name", ["expand", "index"])
def test_copies_of_a_token_for_the_samples_of_the_export_are_one_token_again(name: str) -> None:
    copies = np.repeat(rand(1, 1, 8), 2, 0)
    made = model(
        f"(float[2,3,8] x) => (float[2,4,8] y) {{ y = Concat <axis = 1> ({name}, x) }}",
        **{name: copies},
    )
    recorded(made, name, "pkg.onnxscript.optimizer.folded_from", "['vit.cls_token', 'val_6']")
    graph = same(made, {"x": rand(2, 3, 8)})
    assert graph.trainable == {"vit.cls_token"} and graph.tensors["vit.cls_token"].shape == (
        1,
        1,
        8,
    )
    again = read_model(made, batch=6)
    assert again.tensors["vit.cls_token"].shape == (1, 1, 8) and again.tensors[
        again.outputs[0]
    ].shape == (6, 4, 8)


def test_the_exponential_of_a_temperature_trains_as_its_logarithm() -> None:
    """torch's optimiser leaves the exponential alone in the file (CLIP)."""
    made = model(
        "(float[2,8] x) => (float[2,8] y) { h = MatMul(x, w) y = Mul(h, exp) }",
        w=rand(8, 8),
        exp=np.float32(3),
    )
    recorded(made, "exp", "pkg.onnxscript.optimizer.folded_from", "['model.logit_scale']")
    graph = same(made, {"x": rand(2, 8)})
    assert graph.trainable == {"w", "model.logit_scale"}
    assert not [n for n in graph.notes if n.startswith("not trained")]


def test_parameters_that_the_exporter_computed_away_are_named() -> None:
    made = model(
        "(float[2,8] x) => (float[2,8] y) { h = MatMul(x, w) y = Mul(h, sqrt) }",
        w=rand(8, 8),
        sqrt=np.float32(3),
    )
    recorded(made, "sqrt", "pkg.onnxscript.optimizer.folded_from", "['model.logit_scale']")
    (note,) = (n for n in read_model(made).notes if n.startswith("not trained"))
    assert "'model.logit_scale'" in note and "optimize=False" in note


def test_the_names_of_what_stays_frozen_come_with_the_option_that_trains_them() -> None:
    made = model(
        "(float[2,4,8] x) => (float[2,4,8] y) { h = MatMul(x, w) y = Add(h, t) }",
        w=rand(8, 8),
        t=rand(4, 8),
    )
    made.graph.initializer[1].name = made.graph.node[1].input[1] = "encoder.sinusoids"
    (note,) = (n for n in read_model(made).notes if n.startswith("not trained"))
    assert "'encoder.sinusoids'" in note and "--trainable '+*.sinusoids'" in note


# globs


def test_globs_replace_add_to_and_take_from_the_choice() -> None:
    graph = open_model(GPT, 1).plain
    everything = trained(graph)
    heads = {n for n in everything if n.startswith("transformer.h.1.")}
    assert trained(choose(graph, trainable=["transformer.h.1.*"])) == heads
    assert trained(choose(graph, freeze=["transformer.h.1.*"])) == everything - heads
    part = choose(graph, trainable=["transformer.h.0.*"])
    assert trained(choose(part, trainable=["+transformer.h.1.*"])) == trained(part) | heads
    with pytest.raises(PlanError, match="P036"):
        choose(graph, freeze=["transfomer.h.1.*"])


def test_frozen_parameters_cost_nothing() -> None:
    full = plan(GPT, **MACHINE, pins="dp=8,zero=0,micro=1")
    part = plan(GPT, **MACHINE, pins="dp=8,zero=0,micro=1", trainable=["transformer.h.1.*"])
    graph = open_model(GPT, 8, batch=16, trainable=["transformer.h.1.*"]).plain
    elements = sum(graph.tensors[n].elements for n in graph.trainable)
    cost = part.costs["memory_breakdown_bytes"]
    assert cost["gradients"] == pytest.approx(4 * elements, rel=1e-3) and cost[
        "optimizer"
    ] == pytest.approx(8 * elements, rel=1e-3)
    assert cost["parameters"] == full.costs["memory_breakdown_bytes"]["parameters"]
    assert (
        part.costs["flops_per_device"] < 0.8 * full.costs["flops_per_device"]
    )  # nothing before layer 1 has a backward pass
    moved = sum(
        x["payload"]
        for kind in part.costs["communication_bytes_per_device"].values()
        for x in kind.values()
    )
    assert 4 * elements <= moved < 4 * elements + 1000  # the gradients that exist, and the loss
    module = load_program(program(part, GPT))
    assert set(module.GRADIENTS) == set(module.PARAMS) == {graph.labels[n] for n in graph.trainable}
    assert {graph.labels[n] for n in graph.weights} - set(module.PARAMS) == set(module.FROZEN)


# ties


def tie_model() -> Graph:
    made = model(
        "(int64[2,3] ids) => (float[2,3,16] y) { h = Gather(embed, ids) y = MatMul(h, head) }",
        embed=rand(16, 8),
        head=rand(16, 8).T.copy(),
    )
    graph = read_model(made)
    assert any("--tie" in n for n in graph.notes) and trained(graph) == {"embed", "head"}
    return graph


def test_lost_ties_are_reported_and_mended() -> None:
    graph = choose(tie_model(), tie=["embed=head"])
    assert list(graph.weights) == ["embed"] and trained(graph) == {"embed"}
    (product,) = (n for n in graph.nodes if n.op == "MatMul")
    assert product.inputs[1] == "embed" and product.attrs["trans_b"] == 1
    assert "embed" in graph.notes[-1] and not any("would untie" in n for n in graph.notes)


@pytest.mark.parametrize("pair", ["embed", "embed=embed", "embed=nope", "=head"])
def test_impossible_ties_are_named(pair: str) -> None:
    with pytest.raises(PlanError, match="P036"):
        choose(tie_model(), tie=[pair])


def test_a_tie_of_other_operators_is_transposed_in_the_graph() -> None:
    made = model(
        "(int64[2] i, int64[2] j) => (float[2,8] y, float[2,16] z) { y = Gather(a, i) z = Gather(b,"
        " j) }",
        a=rand(16, 8),
        b=rand(8, 16),
    )
    graph = choose(read_model(made), tie=["a=b"])
    assert [n.op for n in graph.nodes] == ["Gather", "Transpose", "Gather"] and list(
        graph.weights
    ) == ["a"]


# adapters

LORA = "rank=4,targets=*.attn.q_proj.weight,targets=*.mlp.c_fc.weight,alpha=8"


def test_adapters_are_the_only_parameters_that_train_and_are_priced() -> None:
    graph = open_model(GPT, 8, batch=16, lora=LORA).plain
    assert trained(graph) == {
        f"transformer.h.{i}.{n}.weight.lora_{x}"
        for i in range(2)
        for n in ("attn.q_proj", "mlp.c_fc")
        for x in "AB"
    }
    elements = sum(graph.tensors[n].elements for n in graph.trainable)
    full, part = (
        plan(GPT, **MACHINE, pins="dp=8,zero=0"),
        plan(GPT, **MACHINE, pins="dp=8,zero=0", lora=LORA),
    )
    assert part.model["parameters"] == full.model["parameters"] + elements
    assert part.costs["memory_breakdown_bytes"]["optimizer"] == pytest.approx(
        8 * elements, rel=1e-3
    )
    assert part.workload["training"]["lora"] == LORA and "lora" not in full.workload["training"]
    table = parameter_table(graph, 120, False)
    assert re.search(r"lora_B +x2 +4 x \d+ +float32 +[\d,]+ +yes", table) and re.search(
        r"wte.weight .* no ", table
    )


def test_emitted_adapters_equal_the_unsharded_ones_and_leave_the_base_alone() -> None:
    strategy = plan(GPT, **MACHINE, pins="dp=4,tp=2,micro=2", lora=LORA)
    graph = open_model(GPT, 8, batch=16, lora=LORA).graph(2)
    plan_ = strategy.plan_for(graph)
    values = seeded_values(graph, {})  # B random: with B zero, gradients of A are zero
    found, _ = compare(
        graph, plan_, workload="train", backend="shard_map", values=values, step=True
    )
    assert (
        found.compared == 8
        and not found.blind
        and found.gradients < 1e-4
        and found.update is not None
        and found.update < 1e-4
    )
    module = load_program(program(strategy, GPT))
    assert all(".lora_" in key for key in module.PARAMS) and all(
        key in module.PARAMS for key in module.GRADIENTS
    )
    assert any(key.endswith("wte.weight") for key in module.FROZEN)


def test_the_base_is_bit_for_bit_the_same_after_a_step_and_b_starts_at_zero() -> None:
    import jax.numpy as jnp

    from planner.workload.weights import load_one

    strategy = plan("zoo:mlp-tiny", **MACHINE, pins="dp=8", lora="rank=2,targets=*.weight")
    graph = open_model("zoo:mlp-tiny", 8, batch=16, lora="rank=2,targets=*.weight").plain
    assert all(load_one(graph, n, None).any() != n.endswith("lora_B") for n in graph.trainable)
    module = load_program(program(strategy, "zoo:mlp-tiny"))
    mesh = module.make_mesh()
    stored = {n: load_one(graph, n, None) for n in graph.trainable if n.endswith("lora_B")}
    start = module.initial_values(module.PARAMS, 0, stored)
    params = module.place(start, module.specs_of(module.PARAMS), mesh)
    frozen = module.place(
        module.initial_values(module.FROZEN, 1, {}), module.specs_of(module.FROZEN), mesh
    )
    before = {k: np.asarray(v).copy() for k, v in frozen.items()}
    state = module.start_state(module.place(start, module.specs_of(module.GRADIENTS), mesh))
    data = module.place(module.synthetic_batch(0), module.specs_of(module.INPUTS), mesh)
    new, _, loss = module.make_step(mesh)(params, state, frozen, data, jnp.float32(1))
    assert np.isfinite(float(loss)) and set(new) == set(module.PARAMS)
    assert all(np.array_equal(before[k], np.asarray(frozen[k])) for k in before) and before
    assert all(
        np.asarray(v).any() for k, v in new.items() if k.endswith("lora_B")
    )  # B has left zero


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "16",
        "targets=*",
        "rank=0,targets=*",
        "rank=x,targets=*",
        "rank=4,rank=4,targets=*",
        "rank=4,targets=*,alpha=-1",
        "depth=3,targets=*",
        "rank=4,targets=*ln*",
    ],
)
def test_impossible_adapters_are_named(spec: str) -> None:
    graph = open_model(GPT, 1).plain
    if not spec:
        assert choose(graph, lora=spec).trainable == graph.trainable
        return
    with pytest.raises(PlanError, match="P039"):
        choose(graph, lora=spec)


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        (",targets=q_proj", {"q_proj"}),
        (",targets=q_proj,v_proj,alpha=8", {"q_proj", "v_proj"}),
        (",targets=*.c_fc.*", {"c_fc"}),
        (",targets=all-linear", {"q_proj", "k_proj", "v_proj", "out_proj", "c_fc", "c_proj"}),
        ("", {"q_proj", "k_proj", "v_proj", "out_proj", "c_fc", "c_proj"}),
    ],
)
def test_adapters_are_asked_for_by_layer_or_of_all_but_the_head(
    targets: str, layers: set[str]
) -> None:
    for spec in (GPT, GPT + ",tied=0"):
        graph = open_model(spec, 1, lora=f"rank=4{targets}").plain
        adapted = {graph.labels.get(n, n) for n in graph.trainable}
        assert {name.split(".")[-3] for name in adapted} == layers


@pytest.mark.parametrize(
    ("name", "head"),
    [("llama-tiny", "lm_head"), ("mixtral-tiny", "lm_head"), ("vit-tiny", "classifier")],
)
def test_adapters_of_all_layers_of_other_models_leave_the_head_out(name: str, head: str) -> None:
    graph = open_model(f"zoo:{name}", 1, lora="rank=4").plain
    adapted = {graph.labels.get(n, n) for n in graph.trainable}
    assert len(adapted) > 8 and not any(head in label.split(".") for label in adapted)
    assert any(head in graph.labels.get(n, n).split(".") for n in graph.weights)


def test_adapters_of_experts_and_of_heads_stored_transposed() -> None:
    graph = open_model("zoo:mixtral-tiny", 1, lora="rank=2,targets=*").plain
    shapes = {n: graph.tensors[n].shape for n in graph.trainable}
    assert any(len(s) == 3 for s in shapes.values()) and all(2 in s[-2:] for s in shapes.values())


# evaluation mode


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h = MatMul(x, w) y = Relu(h)", "trains without dropout"),
        ("y = Relu(c) c = Conv <pads = [1,1,1,1]> (x, w)", "folded into its neighbours"),
        ("y = BatchNormalization(x, s, b, m, v)", "1 BatchNormalization nodes keep"),
    ],
)
def test_exports_in_evaluation_mode_say_so(text: str, words: str, tmp_path: Path) -> None:
    import onnx

    made = model(
        f"(float[8,4,8,8] x) => (float[8,4,8,8] y) {{ {text} }}",
        **(
            {"w": rand(4, 4, 3, 3)}
            if "Conv" in text
            else (
                {"w": rand(8, 8)}
                if "MatMul" in text
                else {k: np.ones(4, np.float32) for k in "sbmv"}
            )
        ),
    )
    made.producer_name = "pytorch"
    onnx.save(made, tmp_path / "m.onnx")
    assert any(words in n for n in open_model(tmp_path / "m.onnx", 1).plain.notes)
    assert not any(
        "dropout" in n for n in open_model(tmp_path / "m.onnx", 1, workload="infer").plain.notes
    )


def test_filters_that_are_standardised_train() -> None:
    """Weight standardisation (BiT, NFNet) is batch norm over filters: nothing before it trained,
    and nothing said so."""
    made = model(
        "(float[2,4,8,8] x) => (float[2,6,6,6] y) { f = Reshape(w, flat)"
        " n = BatchNormalization(f, gain, zeros, mean, var) k = Reshape(n, back) y = Conv(x, k) }",
        w=rand(6, 4, 3, 3),
        gain=np.ones(6, np.float32),
        zeros=rand(6),
        mean=rand(6),
        var=np.ones(6, np.float32),
        flat=np.array([1, 6, 36]),
        back=np.array([6, 4, 3, 3]),
    )
    assert read_model(made).trainable == {"w", "gain"}
    made.graph.node[1].attribute.add(name="training_mode", type=2, i=1)
    training(read_model(made), microbatches=2)  # no statistics of the batch


def test_statistics_of_batch_norms_are_no_parameters_whatever_they_are_called() -> None:
    """Paddle calls them batch_norm2d_0.w_1 and .w_2: training them was proposed."""
    made = model(
        "(float[2,4,8,8] x) => (float[2,6,6,6] y) { f = Conv(x, w)"
        " y = BatchNormalization(f, gain, shift, mean, var) }",
        w=rand(6, 4, 3, 3),
        gain=rand(6),
        shift=rand(6),
        mean=rand(6),
        var=np.ones(6, np.float32),
    )
    for node in made.graph.node:
        node.input[:] = [f"norm.{i}" if i in ("mean", "var") else i for i in node.input]
    for tensor in made.graph.initializer:
        tensor.name = f"norm.{tensor.name}" if tensor.name in ("mean", "var") else tensor.name
    graph = read_model(made)
    assert graph.trainable == {"w", "gain", "shift"}
    assert not any(getattr(note, "kind", "") == "frozen" for note in graph.notes)


def test_statistics_beside_standardised_filters_are_no_parameters() -> None:
    """The older exporter computes them of a copy that lies the other way, and nothing reads what
    they become: 39 % of NFNet-F0's parameters were such copies."""
    made = model(
        "(float[2,4,8,8] x) => (float[2,6,6,6] y) { f = Reshape(w, flat)"
        " mean = ReduceMean <axes = [0, 2], keepdims = 0> (copy)"
        " n, a, b = BatchNormalization <training_mode = 1> (f, gain, zeros, mean, mean)"
        " k = Reshape(n, back) y = Conv(x, k) }",
        opset=17,
        w=rand(6, 4, 3, 3),
        copy=rand(1, 6, 36),
        gain=np.ones(6, np.float32),
        zeros=np.zeros(6, np.float32),
        flat=np.array([1, 6, 36]),
        back=np.array([6, 4, 3, 3]),
    )
    graph = read_model(made)
    assert "copy" not in graph.weights and graph.trainable == {"w", "gain"}


def test_biases_of_heads_and_of_rows_train() -> None:
    """Keras on JAX writes them so, without names."""
    made = model(
        "(float[2,5,8] x) => (float[2,5,2,4] y) { h = MatMul(x, w) a = Add(h, rows) r = MatMul(a, w)"
        " s = Reshape(r, heads) y = Add(s, bias) }",
        w=rand(8, 8),
        rows=rand(1, 1, 8),
        heads=np.array([2, 5, 2, 4]),
        bias=rand(2, 4),
    )
    assert read_model(made).trainable == {"w", "rows", "bias"}


def test_rows_of_a_made_up_buffer_do_not_train() -> None:
    """A model that writes into an empty tensor (Wan's rotary embeddings): 77 % of a small one's
    parameters were such rows."""
    text = (
        "(float[2,8] x) => (float[2,8] y) { h = MatMul(x, w) r = Gather(table, rows) y = Add(h, r)}"
    )
    for name, trains in (("val_95", False), ("wpe", True)):
        made = model(
            text.replace("table", name),
            **{"w": rand(8, 8), "rows": np.array([3, 1]), name: rand(5, 8)},
        )
        assert (name in read_model(made).trainable) == trains


def test_a_network_over_a_table_trains_with_its_biases() -> None:
    """Swin v2 makes its biases of positions so, and sets a part of another to zero."""
    made = model(
        "(float[2,9,8] x) => (float[2,9,8] y) { h = MatMul(table, cpb.weight) b = Add(h, cpb.bias)"
        " r = Relu(b) t = MatMul(r, cpb2.weight) z = ScatterND(qkv.bias, at, none)"
        " m = MatMul(x, qkv.weight) s = Add(m, z) y = Add(s, t) }".replace(".", "_"),
        table=rand(9, 2),
        cpb_weight=rand(2, 16),
        cpb_bias=rand(16),
        cpb2_weight=rand(16, 8),
        qkv_weight=rand(8, 8),
        qkv_bias=rand(8),
        at=np.array([[0], [1]]),
        none=np.zeros(2, np.float32),
    )
    dotted = {n: n.replace("_", ".") for n in ("cpb_weight", "cpb_bias", "cpb2_weight", "qkv_bias")}
    for tensor in made.graph.initializer:
        tensor.name = dotted.get(tensor.name, tensor.name)
    for node in made.graph.node:
        node.input[:] = [dotted.get(n, n) for n in node.input]
    assert set(dotted.values()) < read_model(made).trainable


CALL = (
    "%n : [num_users=3] = call_function[target=torch.ops.aten._native_batch_norm_legit{}.default]"
    "(args = (%c, %p_weight, %p_bias, %b_mean, %b_var, {}0.1, 1e-05), kwargs = {{}})"
)


def with_call(text: str, operator: str, call: str, **arrays: np.ndarray) -> onnx.ModelProto:
    """As torch's dynamo exporter writes it, with its record of the call of batch_norm."""
    made = model(f"(float[8,4,8,8] x) => (float[8,4,8,8] y) {{ {text} }}", **arrays)
    made.producer_name = "pytorch"
    for node in made.graph.node:
        other = f"%{node.name} : [num_users=1] = call_function[target=torch.ops.aten.relu.default]"
        value = call if node.op_type == operator else other
        node.metadata_props.add(key="pkg.torch.onnx.fx_node", value=value)
    return made


def test_norms_that_the_exporter_folded_or_froze_are_told_by_its_records(tmp_path: Path) -> None:
    """It writes those of a module in training mode as in evaluation, and folds them."""
    vectors = {k: np.ones(4, np.float32) for k in "sbmv"}
    text = "y = BatchNormalization(x, s, b, m, v)"
    modes = []
    for call in (CALL.format("_functional", "True, "), CALL.format("_no_training", "")):
        graph = read_model(with_call(text, "BatchNormalization", call, **vectors))
        modes.append(graph.nodes[0].attrs["training_mode"])
    assert modes == [1, 0]
    conv = "c = Conv <pads = [1,1,1,1]> (x, w) y = Relu(c)"
    for call, told in (
        (CALL.format("_functional", "True, "), "1 BatchNormalization layer is folded"),
        ("%c : [num_users=1] = call_function[target=torch.ops.aten.conv2d.default]", "or without"),
    ):
        onnx.save(with_call(conv, "Conv", call, w=rand(4, 4, 3, 3)), tmp_path / "m.onnx")
        notes = open_model(tmp_path / "m.onnx", 1).plain.notes
        assert any(told in n for n in notes) and not any("had any" in n for n in notes)


DROP_PATH = """(float[4,16] x) => (float[4,8] y) {
    h = MatMul(x, w) e = ConstantOfShape(samples) r = RandomUniformLike(e) kept = Less(r, p)
    k = Cast <to = 1> (kept) s = Div(k, p) d = Mul(h, s) n = RandomNormalLike(d) y = Add(d, n) }"""


@pytest.mark.parametrize("workload", ["train", "infer"])
def test_what_a_model_draws_comes_from_seeds_at_any_batch(workload: str) -> None:
    """Torch writes stochastic depth and noise so: they were kept whole, at the exported batch, and
    no program could be written."""
    made = model(DROP_PATH, samples=np.array([4, 1]), p=np.array(0.75, np.float32), w=rand(16, 8))
    graph = open_model(made, 8, workload=workload, batch=64).graph()
    drawn = [n for n in graph.nodes if n.op.startswith("Random")]
    assert [graph.tensors[n.outputs[0]].shape for n in drawn] == [(64, 1), (64, 8)]
    assert drawn[0].inputs == ("dropout_seed",) and drawn[1].inputs == (drawn[0].outputs[1],)


def test_what_is_drawn_spreads_as_asked() -> None:
    from planner.emit.runtime.kernels.nets import normal, uniform

    place = ((400, 500), "float32", [0, 0], [500, 1])
    u, seed = uniform(np.int32(3), -1.0, 3.0, *place)
    n, _ = normal(np.int32(3), 2.0, 0.5, *place)
    assert seed == 4 and u.min() >= -1 and u.max() < 3
    assert abs(u.mean() - 1) < 0.02 and abs(u.var() - 16 / 12) < 0.02
    assert abs(n.mean() - 2) < 0.01 and abs(n.std() - 0.5) < 0.01


def test_a_number_that_trains_is_written_without_dims(tmp_path: Path) -> None:
    """The program holds stored weights to the model's shapes: CLIP's temperature was [1] in the
    file and refused."""
    text = "q = MatMul(x, wq) s = Exp(logit_scale) y = Mul(q, s)"
    onnx.save(
        model(
            f"(float[2,3,8] x) => (float[2,3,8] y) {{ {text} }}",
            wq=rand(8, 8),
            logit_scale=np.float32(0.5),
        ),
        tmp_path / "m.onnx",
    )
    strategy = plan(
        tmp_path / "m.onnx", devices=2, hardware="cpu", precision="fp32", baselines=False
    )
    strategy.save(tmp_path / "m.plan.json")
    assert (
        main(
            [
                "emit",
                str(tmp_path / "m.plan.json"),
                "--model",
                str(tmp_path / "m.onnx"),
                "-o",
                str(tmp_path / "m.py"),
            ]
        )
        == 0
    )
    raw = (tmp_path / "m.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert {name: row["shape"] for name, row in header.items()} == {"wq": [8, 8], "logit_scale": []}


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("q_proj", "*.q_proj.weight"),
        ("*_proj", "*_proj.weight"),
        ("layers.0.*", "*.layers.0.*"),
        ("qproj", "*.q_proj.weight"),
        ("model.layer.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
    ],
)
def test_a_glob_of_no_parameter_is_answered_by_one_that_matches(typed: str, meant: str) -> None:
    """For 'q_proj' 'q_proj' was offered."""
    graph = open_model("zoo:llama-tiny", 1).plain
    with pytest.raises(PlanError, match="P036") as e:
        choose(graph, trainable=[typed])
    assert e.value.help == (f"did you mean {meant!r}?",)
    assert trained(choose(graph, trainable=[meant]))


def test_an_option_of_a_spec_that_is_given_as_a_dim_is_answered_by_the_spec() -> None:
    with pytest.raises(PlanError, match="P141") as e:
        open_model("zoo:llama-tiny,seq=64,layers=2", 1, dims={"seq": 128})
    assert e.value.help == ("zoo:llama-tiny,layers=2,seq=128",)
    assert open_model(*e.value.help, 1).plain


def test_a_model_that_the_zoo_writes_has_lost_no_tie_in_an_export(tmp_path: Path) -> None:
    """config.json says that head and embedding are apart; a finding called that perhaps an
    accident of its export."""
    fields = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 256,
        "tie_word_embeddings": False,
    }
    config = tmp_path / "config.json"
    config.write_text(json.dumps(fields))
    assert not any("tied" in str(n) for n in open_model(config, 1, dims={"seq": 32}).plain.notes)


def test_what_the_zoo_does_not_write_of_a_config_is_said(tmp_path: Path) -> None:
    """The model that reads images, and a type of weights that plans do not have, are findings;
    constants are assumptions. None reached a plan."""
    fields = {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 256,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        "vision_config": {"hidden_size": 64},
        "quantization_config": {"quant_method": "gptq", "bits": 4},
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    made = plan(tmp_path / "config.json", **MACHINE, dims={"seq": 32})
    texts = [row["text"] for row in made.findings]
    assert "only the text model of gemma3 is written: what reads images or sound is left out" in (
        texts
    )
    assert any("not in the file's type (gptq)" in text for text in texts)
    assert "rotary rescaling is left out: it changes constants, not shapes" in made.assumptions
