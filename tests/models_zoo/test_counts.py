"""The zoo against what was published, by the planner's own count; the command that lists and
writes."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

import models_zoo
from models_zoo.__main__ import main
from models_zoo.count import Count, count
from models_zoo.published import PUBLISHED, Published


@functools.cache
def counted(spec: str) -> Count:
    family, name, values = models_zoo.find(spec)
    return count(family, name, family.presets[name], values)


def within(found: float, wanted: float, share: float) -> None:
    assert abs(found - wanted) <= share * wanted, (
        f"{found:,.0f} is {found / wanted - 1:+.2%} from {wanted:,.0f}"
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("row", PUBLISHED, ids=lambda r: f"{r.spec}-{r.what}".replace("/", "-"))
def test_the_planners_count_is_the_published_one(row: Published) -> None:
    c = counted(row.spec)
    tokens = (
        int(c.sample.removesuffix(" tokens").replace(",", "")) if row.what == "flops/token" else 1
    )
    within(
        {
            "parameters": c.parameters,
            "active": c.active,
            "flops": c.flops,
            "flops/token": (c.flops - c.score_flops) / tokens,
        }[row.what],
        row.value,
        row.within,
    )


def gpt(layers: int, hidden: int, seq: int, vocab: int) -> float:
    """Narayanan et al. 2021, equation 2, its forward third: a product of [s, a] and [a, b] is 2 s a
    b."""
    return 24 * seq * layers * hidden**2 * (1 + seq / (6 * hidden)) + 2 * seq * hidden * vocab


def llama(
    layers: int,
    hidden: int,
    heads: int,
    kv: int,
    ff: int,
    vocab: int,
    seq: int,
    experts: int = 1,
    router: int = 0,
) -> float:
    """Projections (queries and outputs whole, keys and values by groups), scores, `experts` gated
    feed-forwards and a router per token; the head."""
    layer = (
        2 * hidden * (2 * hidden + 2 * hidden * kv // heads)
        + 4 * seq * hidden
        + experts * 6 * hidden * ff
        + 2 * hidden * router
    )
    return seq * (layers * layer + 2 * hidden * vocab)


def t5(layers: int, hidden: int, inner: int, ff: int, vocab: int, seq: int) -> float:
    """Encoder: 4 projections, scores, feed-forward; decoder: twice the attention; the head. Both of
    length seq."""
    attention, feed = 8 * hidden * inner + 4 * seq * inner, 4 * hidden * ff
    return seq * (
        layers * (attention + feed) + layers * (2 * attention + feed) + 2 * hidden * vocab
    )


def deepseek_v3(seq: int) -> float:
    """Latent attention (ranks 1536 and 512, 128 heads of 128 + 64 and 128), 3 plain layers, 58 of 8
    routed experts and a shared one out of 256; the head."""
    h, heads = 7168, 128
    attention = 2 * (
        h * 1536 + 1536 * heads * 192 + h * 576 + 512 * heads * 256 + heads * 128 * h
    ) + 2 * seq * heads * (192 + 128)
    return seq * (
        61 * attention + 3 * 6 * h * 18432 + 58 * (9 * 6 * h * 2048 + 2 * h * 256) + 2 * h * 129280
    )


FORMULAS = {
    "gpt3-175b": gpt(96, 12288, 2048, 50257),
    "megatron-530b": gpt(105, 20480, 2048, 51200),
    "gpt-1t": gpt(128, 25600, 2048, 51200),
    "bert-large": gpt(24, 1024, 512, 0),  # the same layers, without a head of the vocabulary
    "llama3-8b": llama(32, 4096, 32, 8, 14336, 128256, 8192),
    "llama3-70b": llama(80, 8192, 64, 8, 28672, 128256, 8192),
    "llama3-405b": llama(126, 16384, 128, 8, 53248, 128256, 8192),
    "mixtral-8x7b": llama(32, 4096, 32, 8, 14336, 32000, 4096, 2, 8),
    "deepseek-v3": deepseek_v3(4096),
    "mixtral-8x7b,form=gathered": llama(32, 4096, 32, 8, 14336, 32000, 4096, 2, 8),
    "mixtral-8x22b": llama(56, 6144, 48, 8, 16384, 32768, 4096, 2, 8),
    "t5-11b": t5(24, 1024, 16384, 65536, 32128, 512),
}


@pytest.mark.parametrize("spec", FORMULAS)
def test_flops_follow_an_independent_formula(spec: str) -> None:
    within(counted(spec).flops, FORMULAS[spec], 0.01)


@pytest.mark.parametrize(
    "spec",
    [
        "gpt2-medium",
        "llama-tiny,layers=7",
        "deepseek-tiny,layers=9",
        "t5-small",
        "mamba2-130m",
        "dit-s-2",
        "mlp",
        "lstm-1k",
        "bert-base",
    ],
)
def test_counting_from_two_small_models_is_exact(spec: str) -> None:
    from planner.ops.lookup import rule_of
    from planner.reader import read_model

    graph = read_model(models_zoo.build(spec), batch=1)
    c = counted(spec)
    assert (c.parameters, c.flops) == (
        graph.parameters,
        sum(rule_of(n, graph)[0].flops for n in graph.nodes),
    )


def test_the_listing_names_every_preset_in_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[1:] if not line.startswith(" ")] == list(
        models_zoo.presets()
    )
    assert (
        all(len(line) <= 140 for line in lines)
        and "46.7 B (12.9 B)" in out
        and "for --batch" in err
    )


def test_one_model_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["llama-tiny,seq=32", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["parameters"], row["sample"], row["family"]) == (158_016, "32 tokens", "llama")


def test_a_written_file_is_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.onnx"
    assert main(["gpt-tiny,layers=1", "-o", str(path)]) == 0
    assert path.read_bytes() == models_zoo.build("gpt-tiny,layers=1").SerializeToString()
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama", "num_hidden_layers": 1}')
    assert main([str(config), "-o", str(path)]) == 2 and "error[P053]" in capsys.readouterr().err
    assert main([str(config), "-o", str(path), "--force"]) == 0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["gpt-tny", "-o", "x.onnx"], ["error[P070]", "did you mean 'gpt-tiny'?"]),
        (["-o", "x.onnx"], ["error[P003]", "which?"]),
        (["gpt-tiny", "-o", "none/x.onnx"], ["error[P056]", "none/x.onnx"]),
        (["gpt-tiny", "-o", "."], ["error[P056]", "folder"]),
        (["--jsn"], ["error[P002]", "did you mean '--json'?"]),
    ],
)
def test_mistakes_end_in_one_error(
    argv: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert not out and all(w in err for w in words) and not list(tmp_path.iterdir())
