"""`plan weights`: small random checkpoints in the hub's own naming, read by label, trained and
written back, and everything that must be refused."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import planner
from planner.cli import main
from planner.errors import PlanError
from planner.interop.checkpoints import store
from planner.workload.open import open_model

Tensors = dict[str, np.ndarray]
WORDS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int64": "I64", "bool": "BOOL"}
L, H, F, V, P, E = 2, 16, 24, 50, 8, 4
"""Layers, hidden, feed-forward, vocabulary, positions, experts; the key heads of Llama have half of
H."""
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "n_layer": L,
        "n_embd": H,
        "n_head": 2,
        "n_inner": F,
        "vocab_size": V,
        "n_positions": P,
    },
    "llama": {
        "num_hidden_layers": L,
        "hidden_size": H,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": F,
        "vocab_size": V,
        "max_position_embeddings": P,
    },
    "mixtral": {
        "num_hidden_layers": L,
        "hidden_size": H,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": F,
        "vocab_size": V,
        "max_position_embeddings": P,
        "num_local_experts": E,
    },
    "phi3": {
        "num_hidden_layers": L,
        "hidden_size": H,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": F,
        "vocab_size": V,
        "max_position_embeddings": P,
    },
    "granitemoe": {
        "num_hidden_layers": L,
        "hidden_size": H,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": F,
        "vocab_size": V,
        "max_position_embeddings": P,
        "num_local_experts": E,
    },
    "gpt_neox": {
        "num_hidden_layers": L,
        "hidden_size": H,
        "num_attention_heads": 4,
        "intermediate_size": F,
        "vocab_size": V,
        "max_position_embeddings": P,
        "rotary_pct": 0.5,
    },
    "bloom": {"n_layer": L, "hidden_size": H, "n_head": 4, "vocab_size": V, "seq_length": P},
    "bert": {
        "num_hidden_layers": L,
        "hidden_size": H,
        "num_attention_heads": 2,
        "intermediate_size": F,
        "vocab_size": V,
        "max_position_embeddings": P,
        "architectures": ["BertForMaskedLM"],
    },
}


def gpt2() -> dict[str, tuple[int, ...]]:
    """Without the word `transformer`, as the hub's first checkpoint has it, with a buffer that no
    graph reads."""
    rows = {"wte.weight": (V, H), "wpe.weight": (P, H), "ln_f.weight": (H,), "ln_f.bias": (H,)}
    for i in range(L):
        sizes = {
            "ln_1": (H,),
            "ln_2": (H,),
            "attn.c_attn": (H, 3 * H),
            "attn.c_proj": (H, H),
            "mlp.c_fc": (H, F),
            "mlp.c_proj": (F, H),
        }
        rows |= {f"h.{i}.{n}.weight": s for n, s in sizes.items()} | {
            f"h.{i}.{n}.bias": s[-1:] for n, s in sizes.items()
        }
        rows[f"h.{i}.attn.bias"] = (1, 1, P, P)
    return rows


def llama(experts: bool = False) -> dict[str, tuple[int, ...]]:
    rows = {
        "model.embed_tokens.weight": (V, H),
        "model.norm.weight": (H,),
        "lm_head.weight": (V, H),
    }
    for i in range(L):
        sizes = {
            "input_layernorm": (H,),
            "post_attention_layernorm": (H,),
            "self_attn.q_proj": (H, H),
            "self_attn.k_proj": (H // 2, H),
            "self_attn.v_proj": (H // 2, H),
            "self_attn.o_proj": (H, H),
        }
        if experts:
            sizes["block_sparse_moe.gate"] = (E, H)
            sizes |= {
                f"block_sparse_moe.experts.{e}.{w}": s
                for e in range(E)
                for w, s in (("w1", (F, H)), ("w2", (H, F)), ("w3", (F, H)))
            }
        else:
            sizes |= {"mlp.gate_proj": (F, H), "mlp.up_proj": (F, H), "mlp.down_proj": (H, F)}
        rows |= {f"model.layers.{i}.{n}.weight": s for n, s in sizes.items()}
    return rows


def bert() -> dict[str, tuple[int, ...]]:
    """With gamma and beta, as the hub's first checkpoint has them, the head's tied copies, and a
    head that the graph lacks."""
    e, h = "bert.embeddings", "cls.predictions"
    rows = {
        f"{e}.word_embeddings.weight": (V, H),
        f"{e}.position_embeddings.weight": (P, H),
        f"{e}.token_type_embeddings.weight": (2, H),
        f"{h}.bias": (V,),
        f"{h}.decoder.weight": (V, H),
        f"{h}.transform.dense.weight": (H, H),
        f"{h}.transform.dense.bias": (H,),
        "cls.seq_relationship.weight": (2, H),
    }
    norms = [f"{e}.LayerNorm", f"{h}.transform.LayerNorm"]
    for i in range(L):
        b = f"bert.encoder.layer.{i}"
        norms += [f"{b}.attention.output.LayerNorm", f"{b}.output.LayerNorm"]
        sizes = {
            "attention.self.query": (H, H),
            "attention.self.key": (H, H),
            "attention.self.value": (H, H),
            "attention.output.dense": (H, H),
            "intermediate.dense": (F, H),
            "output.dense": (H, F),
        }
        rows |= {f"{b}.{n}.weight": s for n, s in sizes.items()} | {
            f"{b}.{n}.bias": s[:1] for n, s in sizes.items()
        }
    return rows | {f"{n}.{w}": (H,) for n in norms for w in ("gamma", "beta")}


def fused(experts: bool = False) -> dict[str, tuple[int, ...]]:
    """Phi-3's: queries, keys and values in one matrix, gate and up in one; or GraniteMoE's stacks."""
    rows = llama()
    for i in range(L):
        at = f"model.layers.{i}"
        own = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj") if experts else (
            *(f"self_attn.{n}_proj" for n in "qkv"), "mlp.gate_proj", "mlp.up_proj"
        )  # fmt: skip
        for name in own:
            del rows[f"{at}.{name}.weight"]
        more = (
            {
                "block_sparse_moe.router.layer": (E, H),
                "block_sparse_moe.input_linear": (E, 2 * F, H),
                "block_sparse_moe.output_linear": (E, H, F),
            }
            if experts
            else {"self_attn.qkv_proj": (2 * H, H), "mlp.gate_up_proj": (2 * F, H)}
        )
        rows |= {f"{at}.{n}.weight": s for n, s in more.items()}
    return rows


def by_heads(family: str) -> dict[str, tuple[int, ...]]:
    """Queries, keys and values of each head behind one another: GPT-NeoX, BLOOM."""
    neox = family == "gpt_neox"
    base, wide = ("gpt_neox.layers", F) if neox else ("transformer.h", 4 * H)
    attention, last = ("attention", "final_layer_norm") if neox else ("self_attention", "ln_f")
    top = base.rpartition(".")[0]
    rows = {f"{top}.{'embed_in' if neox else 'word_embeddings'}.weight": (V, H)}
    rows |= {"embed_out.weight": (V, H)} if neox else {}
    norms = [f"{top}.{last}"] + ([] if neox else [f"{top}.word_embeddings_layernorm"])
    for i in range(L):
        sizes = {
            f"{attention}.query_key_value": (3 * H, H),
            f"{attention}.dense": (H, H),
            "mlp.dense_h_to_4h": (wide, H),
            "mlp.dense_4h_to_h": (H, wide),
        }
        rows |= {f"{base}.{i}.{n}.weight": s for n, s in sizes.items()}
        rows |= {f"{base}.{i}.{n}.bias": s[:1] for n, s in sizes.items()}
        norms += [f"{base}.{i}.{n}_layernorm" for n in ("input", "post_attention")]
    return rows | {f"{n}.{w}": (H,) for n in norms for w in ("weight", "bias")}


SHAPES = {
    "gpt_neox": lambda: by_heads("gpt_neox"),
    "bloom": lambda: by_heads("bloom"),
    "gpt2": gpt2,
    "llama": llama,
    "mixtral": lambda: llama(experts=True),
    "bert": bert,
    "phi3": fused,
    "granitemoe": lambda: fused(experts=True),
}


def checkpoint(family: str, dtype: str = "float32") -> Tensors:
    """Random values under the names and shapes of a family; tied copies equal."""
    rng = np.random.default_rng(1)
    kind = np.dtype(dtype) if dtype != "bfloat16" else np.dtype(ml_dtypes.bfloat16)
    out = {
        name: rng.standard_normal(shape, np.float32).astype(kind)
        for name, shape in SHAPES[family]().items()
    }
    if family == "bert":
        out["cls.predictions.decoder.weight"] = out["bert.embeddings.word_embeddings.weight"]
    return out


def save(path: Path, tensors: Tensors) -> Path:
    """A .safetensors file, written apart from the code under test."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, a in tensors.items():
        header[name] = {
            "dtype": WORDS[str(a.dtype)],
            "shape": a.shape,
            "data_offsets": [end, end := end + a.nbytes],
        }
    text = json.dumps(header).encode()
    path.write_bytes(
        len(text).to_bytes(8, "little") + text + b"".join(a.tobytes() for a in tensors.values())
    )
    return path


def folder(home: Path, family: str, tensors: Tensors, shards: int = 1) -> Path:
    """A checkpoint as it lies on the hub."""
    home.mkdir(parents=True)
    (home / "config.json").write_text(json.dumps({"model_type": family, **CONFIGS[family]}))
    if shards == 1:
        save(home / "model.safetensors", tensors)
        return home
    names, table = list(tensors), dict[str, str]()
    for k in range(shards):
        file = f"model-{k + 1:05}-of-{shards:05}.safetensors"
        save(home / file, {n: tensors[n] for n in names[k::shards]})
        table |= dict.fromkeys(names[k::shards], file)
    (home / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": table})
    )
    return home


def load(path: Path) -> Tensors:
    """A file's arrays, copied."""
    return {name: np.array(t.array()) for name, t in store.read_header(path).items()}


def weights(home: Path, out: Path, *more: str, model: str = "") -> int:
    return main(
        ["weights", model or str(home / "config.json"), "--from", str(home), "-o", str(out), *more]
    )


def trained(path: Path, values: Tensors) -> Path:
    """What --export writes: float32."""
    return save(path, {n: v.astype(np.float32) for n, v in values.items()})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("family", "shards"),
    [
        ("gpt2", 1),
        ("llama", 2),
        ("mixtral", 3),
        ("bert", 1),
        ("phi3", 2),
        ("granitemoe", 1),
        ("gpt_neox", 2),
        ("bloom", 1),
    ],
)
def test_there_and_back_is_bit_equal(family: str, shards: int, dtype: str, tmp_path: Path) -> None:
    """Every file of the checkpoint, its headers included, comes back byte for byte through the
    float32 of --export."""
    home = folder(tmp_path / "hub", family, checkpoint(family, dtype), shards)
    assert weights(home, tmp_path / "w.safetensors") == 0
    values = load(tmp_path / "w.safetensors")
    assert {str(v.dtype) for v in values.values()} == {dtype}
    assert (
        weights(
            home, tmp_path / "again", "--back", str(trained(tmp_path / "t.safetensors", values))
        )
        == 0
    )
    assert sorted(p.name for p in (tmp_path / "again").iterdir()) == sorted(
        p.name for p in home.iterdir()
    )
    for path in home.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name


def test_parameters_lie_as_the_graph_has_them(tmp_path: Path) -> None:
    """Parts, turns and stacks beside what the families' documentation says of their layouts. Square
    weights too: o_proj of Llama is turned, c_proj of GPT-2 not."""
    a, b, c = checkpoint("gpt2"), checkpoint("mixtral"), checkpoint("bert")
    for family, tensors in (("gpt2", a), ("mixtral", b), ("bert", c)):
        assert (
            weights(folder(tmp_path / family, family, tensors), tmp_path / f"{family}.safetensors")
            == 0
        )
    g, m, e = (load(tmp_path / f"{family}.safetensors") for family in ("gpt2", "mixtral", "bert"))
    for k, head in enumerate("qkv"):
        assert np.array_equal(
            g[f"transformer.h.1.attn.{head}_proj.weight"],
            a["h.1.attn.c_attn.weight"][:, k * H : (k + 1) * H],
        )
        assert np.array_equal(
            g[f"transformer.h.1.attn.{head}_proj.bias"],
            a["h.1.attn.c_attn.bias"][k * H : (k + 1) * H],
        )
    assert np.array_equal(g["transformer.h.0.attn.out_proj.weight"], a["h.0.attn.c_proj.weight"])
    assert np.array_equal(
        m["model.layers.0.self_attn.o_proj.weight"], b["model.layers.0.self_attn.o_proj.weight"].T
    )
    assert np.array_equal(m["lm_head.weight"], b["lm_head.weight"].T)
    experts = "model.layers.1.block_sparse_moe.experts"
    for ours, theirs in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        assert np.array_equal(
            m[f"{experts}.{ours}.weight"],
            np.stack([b[f"{experts}.{k}.{theirs}.weight"].T for k in range(E)]),
        )
    assert np.array_equal(
        e["bert.embeddings.LayerNorm.weight"], c["bert.embeddings.LayerNorm.gamma"]
    )
    assert len(g) == 4 + 16 * L and len(m) == 3 + 10 * L


@pytest.mark.parametrize("family", ["gpt_neox", "bloom"])
def test_heads_whose_queries_keys_and_values_lie_together(family: str, tmp_path: Path) -> None:
    tensors = checkpoint(family)
    assert weights(folder(tmp_path / "hub", family, tensors), tmp_path / "w.safetensors") == 0
    found, heads = load(tmp_path / "w.safetensors"), 4
    (matrix,) = (a for n, a in tensors.items() if n.endswith(".1." + _QKV[family] + ".weight"))
    (bias,) = (a for n, a in tensors.items() if n.endswith(".1." + _QKV[family] + ".bias"))
    for k, what in enumerate("qkv"):
        at = f"model.layers.1.self_attn.{what}_proj"
        own = matrix.reshape(heads, 3, H // heads, H)[:, k].reshape(H, H).T
        assert np.array_equal(found[f"{at}.weight"], own)
        own = bias.reshape(heads, 3, H // heads)[:, k].reshape(H)
        assert np.array_equal(found[f"{at}.bias"].reshape(H), own)


_QKV = {"gpt_neox": "attention.query_key_value", "bloom": "self_attention.query_key_value"}


def test_fused_projections_are_parted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Queries are the first rows of Phi-3's matrix, half as many keys and values follow; gate and
    up are halves, of GraniteMoE's stacks too. Rows that nobody reads are an error."""
    p, g = checkpoint("phi3"), checkpoint("granitemoe")
    home = folder(tmp_path / "phi3", "phi3", p)
    assert weights(home, tmp_path / "p") == 0
    assert weights(folder(tmp_path / "moe", "granitemoe", g), tmp_path / "g") == 0
    ours, mixed = load(tmp_path / "p"), load(tmp_path / "g")
    at = "model.layers.1"
    whole = p[f"{at}.self_attn.qkv_proj.weight"]
    for name, low, high in (("q", 0, H), ("k", H, H + H // 2), ("v", H + H // 2, 2 * H)):
        assert np.array_equal(ours[f"{at}.self_attn.{name}_proj.weight"], whole[low:high].T)
    for k, name in enumerate(("gate_proj", "up_proj")):
        half = slice(k * F, (k + 1) * F)
        assert np.array_equal(
            ours[f"{at}.mlp.{name}.weight"], p[f"{at}.mlp.gate_up_proj.weight"][half].T
        )
        assert np.array_equal(
            mixed[f"{at}.mlp.experts.{name}.weight"],
            g[f"{at}.block_sparse_moe.input_linear.weight"][:, half].swapaxes(1, 2),
        )
    wide = np.concatenate([whole, whole[:4]])
    torn = folder(tmp_path / "torn", "phi3", {**p, f"{at}.self_attn.qkv_proj.weight": wide})
    assert weights(torn, tmp_path / "t") == 2
    assert "values have 32 rows" in capsys.readouterr().err


def test_training_reaches_every_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """New values are in the new folder where the old ones were: in both names of a tie, in one
    third of c_attn; what no parameter reads is as it was."""
    tensors = checkpoint("gpt2", "bfloat16")
    tensors["lm_head.weight"] = tensors["wte.weight"]
    home = folder(tmp_path / "hub", "gpt2", tensors)
    assert weights(home, tmp_path / "w.safetensors") == 0
    told = capsys.readouterr().err
    assert (
        "tied: lm_head.weight = wte.weight" in told
        and "not in the model: h.*.attn.bias x2" in told
        and "36 of 36 parameters" in told
    )
    values = load(tmp_path / "w.safetensors")
    new = {n: v.astype(np.float32) + 1 for n, v in values.items()}
    new["transformer.h.0.attn.k_proj.weight"] += 2
    assert (
        weights(home, tmp_path / "again", "--back", str(trained(tmp_path / "t.safetensors", new)))
        == 0
    )
    assert "29 tensors with the values" in capsys.readouterr().err
    back = load(tmp_path / "again" / "model.safetensors")
    step = lambda name: back[name].astype(np.float32) - (tensors[name].astype(np.float32) + 1)  # noqa: E731
    assert np.array_equal(back["lm_head.weight"], back["wte.weight"])
    assert all(
        np.array_equal(back[f"h.{i}.attn.bias"], tensors[f"h.{i}.attn.bias"]) for i in range(L)
    )
    third = step("h.0.attn.c_attn.weight")
    assert (
        abs(third[:, H : 2 * H] - 2).max() < 0.04
        and abs(third[:, :H]).max() < 0.02
        and abs(third[:, 2 * H :]).max() < 0.02
    )


def test_padding_is_made_and_undone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A vocabulary of 50 in a graph of 64: zeros in the table and in the head, and 50 rows again on
    the way back, whatever the padding became."""
    tensors = checkpoint("llama")
    home = folder(tmp_path / "hub", "llama", tensors)
    spec = f"zoo:llama-tiny,layers={L},hidden={H},heads=4,kv_heads=2,ff={F},vocab=64,seq={P}"
    assert weights(home, tmp_path / "w.safetensors", model=spec) == 0
    assert "padded: lm_head.weight from 50 to 64 rows" in capsys.readouterr().err
    values = load(tmp_path / "w.safetensors")
    assert values["model.embed_tokens.weight"].shape == (64, H) and values[
        "lm_head.weight"
    ].shape == (H, 64)
    assert (
        not values["model.embed_tokens.weight"][V:].any()
        and not values["lm_head.weight"][:, V:].any()
    )
    values["lm_head.weight"][:, V:] = 7
    assert (
        weights(
            home,
            tmp_path / "again",
            "--back",
            str(trained(tmp_path / "t.safetensors", values)),
            model=spec,
        )
        == 0
    )
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        home / "model.safetensors"
    ).read_bytes()
    (home / "config.json").unlink()
    assert (
        weights(home, tmp_path / "x.safetensors", model=spec) == 2
    )  # nobody says that 50 is the vocabulary
    assert "config.json beside the shards" in capsys.readouterr().err


def test_all_that_is_missing_or_does_not_fit_in_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = checkpoint("mixtral")
    del tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"], tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((H, H), np.float32)
    tensors["model.layers.0.block_sparse_moe.gate.weight"] = np.zeros((E, H), np.int64)
    home = folder(tmp_path / "hub", "mixtral", tensors)
    assert weights(home, tmp_path / "w.safetensors") == 2
    told = capsys.readouterr().err
    assert "error[P211]: 4 of 23 parameters" in told and told.count("error[") == 1
    assert (
        "model.norm.weight is not in the checkpoint" in told
        and "model.layers.1.block_sparse_moe.experts.up_proj.weight is not in" in told
    )
    assert (
        "model.layers.0.self_attn.k_proj.weight is [16, 8], model.layers.0.self_attn.k_proj.weight"
        " [16, 16] turned" in told
    )
    assert (
        "block_sparse_moe.gate.weight is float32, model.layers.0.block_sparse_moe.gate.weight I64"
        in told
    )
    assert not (tmp_path / "w.safetensors").exists()


def test_partial_leaves_out_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A head that the checkpoint lacks; without -o nothing is written, and both sides are
    listed."""
    tensors = checkpoint("bert")
    del tensors["cls.predictions.transform.dense.weight"]
    home = folder(tmp_path / "hub", "bert", tensors)
    assert main(["weights", str(home / "config.json"), "--from", str(home), "--partial"]) == 0
    told = capsys.readouterr().out
    assert (
        "not in the checkpoint: cls.predictions.transform.dense.weight" in told
        and "not in the model: cls.seq_relationship.weight" in told
    )
    assert weights(home, tmp_path / "w.safetensors", "--partial") == 0
    values = load(tmp_path / "w.safetensors")
    assert "cls.predictions.transform.dense.weight" not in values
    values["cls.predictions.transform.dense.weight"] = np.ones((H, H), np.float32)
    capsys.readouterr()
    assert (
        weights(
            home,
            tmp_path / "again",
            "--partial",
            "--back",
            str(trained(tmp_path / "t.safetensors", values)),
        )
        == 0
    )
    assert "left out: cls.predictions.transform.dense.weight" in capsys.readouterr().err
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        home / "model.safetensors"
    ).read_bytes()


def test_a_zoo_model_with_other_arithmetic(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gemma's names and shapes are Llama's, its norms are not. What a zoo model leaves out is
    said."""
    home = folder(tmp_path / "hub", "llama", checkpoint("llama"))
    config = {"model_type": "llama", **CONFIGS["llama"], "rope_scaling": {"rope_type": "llama3"}}
    (home / "config.json").write_text(json.dumps(config))
    assert weights(home, tmp_path / "w.safetensors") == 0
    assert "Rotary rescaling is left out" in capsys.readouterr().err
    (home / "config.json").write_text(json.dumps({**config, "model_type": "gemma"}))
    assert (
        weights(
            home,
            tmp_path / "x.safetensors",
            model=f"zoo:llama-tiny,layers={L},hidden={H},ff={F},vocab={V},seq={P}",
        )
        == 2
    )
    assert "error[P213]" in (told := capsys.readouterr().err) and "1 + weight" in told


def test_dims_of_one_are_no_misfit(tmp_path: Path) -> None:
    """Readers make the biases of convolutions [C, 1, 1]: the values are the same, and come back in
    the checkpoint's shape."""
    config = {
        "model_type": "vit",
        "num_hidden_layers": 1,
        "hidden_size": H,
        "num_attention_heads": 2,
        "intermediate_size": F,
        "image_size": 8,
        "patch_size": 4,
    }
    base = "vit.embeddings"
    rows = {
        f"{base}.cls_token": (1, 1, H),
        f"{base}.position_embeddings": (1, 5, H),
        f"{base}.patch_embeddings.projection.weight": (H, 3, 4, 4),
        f"{base}.patch_embeddings.projection.bias": (H,),
    }
    rng = np.random.default_rng(2)
    home = tmp_path / "hub"
    home.mkdir()
    (home / "config.json").write_text(json.dumps(config))
    tensors = {n: rng.standard_normal(s, np.float32) for n, s in rows.items()}
    save(home / "model.safetensors", tensors)
    assert weights(home, tmp_path / "w.safetensors", "--partial") == 0
    values = load(tmp_path / "w.safetensors")
    assert values[f"{base}.patch_embeddings.projection.bias"].shape == (H, 1, 1)
    values |= {n: np.zeros(s, np.float32) for n, s in zoo_shapes(home).items() if n not in values}
    assert (
        weights(
            home,
            tmp_path / "again",
            "--partial",
            "--back",
            str(trained(tmp_path / "t.safetensors", values)),
        )
        == 0
    )
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        home / "model.safetensors"
    ).read_bytes()


def zoo_shapes(home: Path) -> dict[str, tuple[int, ...]]:
    graph = open_model(str(home / "config.json"), 1).plain
    return {graph.labels[n]: graph.tensors[n].shape for n in graph.weights}


def test_ties_that_do_not_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint with two values and a graph with one; a graph with two and a checkpoint with one
    place, which must agree on the way back."""
    tensors = checkpoint("gpt2")
    tensors["lm_head.weight"] = tensors["wte.weight"] + 1
    assert weights(folder(tmp_path / "a", "gpt2", tensors), tmp_path / "w.safetensors") == 2
    assert "lm_head.weight differs from wte.weight" in capsys.readouterr().err
    tensors = checkpoint("llama")
    del tensors["lm_head.weight"]
    home = folder(tmp_path / "b", "llama", tensors)
    assert weights(home, tmp_path / "w.safetensors") == 0
    assert (
        "tied: lm_head.weight and model.embed_tokens.weight are read from one tensor,"
        " model.embed_tokens.weight" in capsys.readouterr().err
    )
    values = load(tmp_path / "w.safetensors")
    assert np.array_equal(values["lm_head.weight"], values["model.embed_tokens.weight"].T)
    values["lm_head.weight"][3, 5] += 1
    assert (
        weights(
            home, tmp_path / "again", "--back", str(trained(tmp_path / "t.safetensors", values))
        )
        == 2
    )
    assert "P212" in (told := capsys.readouterr().err) and "differ now" in told and "--tie" in told
    assert not (tmp_path / "again").exists() and not list(tmp_path.glob(".again*"))


def test_only_an_export_of_the_model_goes_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = folder(tmp_path / "hub", "llama", checkpoint("llama", "float16"))
    assert weights(home, tmp_path / "w.safetensors") == 0
    good = load(tmp_path / "w.safetensors")
    wrong = {
        **good,
        "stranger": np.zeros(2, np.float32),
        "model.norm.weight": np.zeros(H + 1, np.float32),
    }
    del wrong["lm_head.weight"]
    for values, words in (
        (
            wrong,
            (
                "stranger is no parameter",
                "model.norm.weight is [17]",
                "lm_head.weight trains and is not",
            ),
        ),
        (
            {**good, "model.norm.weight": np.full(H, 1e6, np.float32)},
            ("model.norm.weight has values beyond float16",),
        ),
    ):
        capsys.readouterr()
        assert (
            weights(
                home, tmp_path / "again", "--back", str(trained(tmp_path / "t.safetensors", values))
            )
            == 2
        )
        told = capsys.readouterr().err
        assert all(w in told for w in ("P212", *words)), told
    frozen = {n: v for n, v in good.items() if n != "lm_head.weight"}
    assert (
        weights(
            home,
            tmp_path / "again",
            "--freeze",
            "lm_head.weight",
            "--back",
            str(trained(tmp_path / "t.safetensors", frozen)),
        )
        == 0
    )
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        home / "model.safetensors"
    ).read_bytes()


def test_files_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = folder(tmp_path / "hub", "llama", checkpoint("llama"))
    out = tmp_path / "w.safetensors"
    out.write_bytes(b"mine")
    assert weights(home, out) == 2 and out.read_bytes() == b"mine"
    assert weights(home, out, "--force") == 0
    assert weights(home, home, "--back", str(out)) == 2 and "P053" in capsys.readouterr().err
    assert (
        main(["weights", str(home / "config.json"), "--from", str(home), "--back", str(out)]) == 2
        and "-o names it" in capsys.readouterr().err
    )


def test_a_full_disk_is_seen_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = folder(tmp_path / "hub", "llama", checkpoint("llama"))
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=100))
    assert weights(home, tmp_path / "w.safetensors") == 2
    assert "100 are free" in capsys.readouterr().err and not (tmp_path / "w.safetensors").exists()


# --- what strangers put in a folder


def test_names_of_files_stay_in_the_folder(tmp_path: Path) -> None:
    save(tmp_path / "secret.safetensors", {"a": np.zeros(2, np.float32)})
    home = tmp_path / "hub"
    home.mkdir()
    for name in (
        "../secret.safetensors",
        str(tmp_path / "secret.safetensors"),
        "..",
        "sub/../../secret.safetensors",
    ):
        (home / store.INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(PlanError, match=r"P210.*leads out of"):
            store.open_folder(home)
    (home / store.INDEX).unlink()
    (home / store.SINGLE).symlink_to(tmp_path / "secret.safetensors")
    with pytest.raises(PlanError, match=r"P210.*a link that leads out"):
        store.open_folder(home)


def test_the_cache_of_the_hub_is_read(tmp_path: Path) -> None:
    """Its snapshots are links to blobs beside them."""
    blobs, snapshot = (
        tmp_path / "models--a--b" / "blobs",
        tmp_path / "models--a--b" / "snapshots" / "0123",
    )
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save(blobs / "abc", {"a": np.arange(3, dtype=np.float32)})
    (snapshot / store.SINGLE).symlink_to(Path("../../blobs/abc"))
    assert np.array_equal(store.open_folder(snapshot).tensors["a"].array(), [0, 1, 2])


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("[]", "no table"),
        ("{", "no JSON"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"a": 3}}', "no weight_map"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "is missing"),
        ('{"weight_map": {"b": "model.safetensors"}}', "lack them"),
        ("[" * 100_000, "no JSON"),
    ],
)
def test_a_bad_index(index: str, words: str, tmp_path: Path) -> None:
    save(tmp_path / store.SINGLE, {"a": np.zeros(2, np.float32)})
    (tmp_path / store.INDEX).write_text(index)
    with pytest.raises(PlanError, match=rf"P210.*{words}"):
        store.open_folder(tmp_path)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"shape": [1 << 40, 1 << 40]}, "belongs at"),
        ({"shape": [-2]}, "has dtype"),
        ({"dtype": "F31"}, "has dtype"),
        ({"data_offsets": [4, 12]}, "belongs at"),
        ({"data_offsets": [0, 16], "shape": [4]}, "its tensors end at"),
        ({"data_offsets": [0]}, "has dtype"),
        ({"shape": [True, 2]}, "has dtype"),
    ],
)
def test_a_header_that_lies(row: dict[str, Any], words: str, tmp_path: Path) -> None:
    text = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **row}}).encode()
    (tmp_path / store.SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(PlanError, match=rf"P210.*{words}"):
        store.open_folder(tmp_path)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(at=st.integers(0, 150), noise=st.binary(min_size=1, max_size=4), cut=st.booleans())
def test_damaged_files_are_refused_or_read(
    at: int, noise: bytes, cut: bool, tmp_path: Path
) -> None:
    """Any bytes changed, or the end cut off: P210, or tensors whose bytes are all in the file."""
    path = save(
        tmp_path / store.SINGLE, {"a": np.ones((2, 3), np.float32), "b": np.ones(2, np.float16)}
    )
    raw = path.read_bytes()
    path.write_bytes(raw[:at] if cut else raw[:at] + noise + raw[at + len(noise) :])
    try:
        found = store.open_folder(tmp_path)
    except PlanError as e:
        assert e.code == "P210"
    else:
        assert all(
            t.offset + t.array().nbytes <= path.stat().st_size for t in found.tensors.values()
        )


# --- through a program


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("pins", "precision"),
    [
        ("tp=2,dp=2", "bf16-mixed"),
        pytest.param("pp=2,dp=2,micro=2", "fp32", marks=pytest.mark.slow),
    ],
)
def test_a_program_starts_from_it_and_exports_it(
    pins: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """plan weights, --weights, --export, plan weights --back, with nothing trained between: the
    checkpoint bit for bit, also where the program computes in bfloat16 and pads its shards."""
    import jax

    from planner.emit.from_strategy import program
    from planner.verify.numerics import load_program

    home = folder(tmp_path / "hub", "gpt2", checkpoint("gpt2"))
    assert weights(home, tmp_path / "w.safetensors") == 0
    source = str(home / "config.json")
    made = planner.plan(
        source, devices=4, hardware="cpu", precision=precision, batch=4, pins=pins, baselines=False
    )
    every = jax.devices()
    monkeypatch.setattr(jax, "devices", lambda *a: every[:4])
    m = load_program(
        program(made, source), compute="bfloat16" if precision == "bf16-mixed" else "float32"
    )
    _, params, state = m.begin(
        types.SimpleNamespace(seed=0), m.read_safetensors(tmp_path / "w.safetensors"), m.make_mesh()
    )
    m.export(tmp_path / "t.safetensors", params, state)
    assert weights(home, tmp_path / "again", "--back", str(tmp_path / "t.safetensors")) == 0
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        home / "model.safetensors"
    ).read_bytes()
