"""Encoders of a Hugging Face config.json: `models_zoo.bert`, `models_zoo.modernbert` and
`models_zoo.whisper` with the fields of each model type. Defaults are those of transformers 5.24."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from models_zoo import bert, modernbert, whisper
from models_zoo.hf_decoders import Read
from models_zoo.hf_fields import Fields
from models_zoo.hf_layers import rescaled
from models_zoo.spec import LAYERS_LIMIT, Family


def _head(f: Fields) -> Literal["mlm", "cls"]:
    """Whether an encoder predicts tokens, by the class that the file names."""
    names = f.data.get("architectures")
    predicts = isinstance(names, list) and any(
        isinstance(n, str) and n.endswith(("ForMaskedLM", "ForPreTraining")) for n in names
    )
    return "mlm" if predicts else "cls"


def _bert(f: Fields) -> tuple[Family, Any]:
    return _encoder(f, vocab=30522, first=0)


def _roberta(vocab: int) -> Read:
    """BERT's layers and heads; the first two rows of the position table belong to padding."""
    return lambda f: _encoder(f, vocab=vocab, first=2)


def _encoder(f: Fields, *, vocab: int, first: int) -> tuple[Family, Any]:
    f.one_of("hidden_act", "gelu", {"gelu": True})
    window = f.whole("max_position_embeddings", 512)
    return bert.FAMILY, bert.BertConfig(
        layers=f.layers("num_hidden_layers", 12),
        hidden=f.whole("hidden_size", 768),
        heads=f.whole("num_attention_heads", 12),
        ff=f.whole("intermediate_size", 3072),
        vocab=f.whole("vocab_size", vocab),
        seq=max(1, f.length("max_position_embeddings", 512) - first),
        positions=window,
        types=f.whole("type_vocab_size", 2),
        classes=f.labels(2),
        epsilon=f.number("layer_norm_eps", 1e-12),
        head=_head(f),
    )


def _distilbert(f: Fields) -> tuple[Family, Any]:
    f.one_of("activation", "gelu", {"gelu": True})
    f.only("sinusoidal_pos_embds", False)
    return bert.FAMILY, bert.BertConfig(
        layers=f.layers("n_layers", 6),
        hidden=f.whole("dim", 768),
        heads=f.whole("n_heads", 12),
        ff=f.whole("hidden_dim", 3072),
        vocab=f.whole("vocab_size", 30522),
        seq=f.length("max_position_embeddings", 512),
        positions=f.whole("max_position_embeddings", 512),
        types=0,
        classes=f.labels(2),
        epsilon=1e-12,
        head=_head(f),
        pool="relu",
    )


def _modernbert(f: Fields) -> tuple[Family, Any]:
    layers = f.layers("num_hidden_layers", 22)
    f.one_of("hidden_activation", "gelu", {"gelu": True})
    f.one_of("classifier_activation", "gelu", {"gelu": True})
    theta, near = _thetas(f)
    return modernbert.FAMILY, modernbert.ModernBertConfig(
        layers=layers,
        hidden=f.whole("hidden_size", 768),
        heads=f.whole("num_attention_heads", 12),
        ff=f.whole("intermediate_size", 1152),
        vocab=f.whole("vocab_size", 50368),
        seq=f.length("max_position_embeddings", 8192),
        epsilon=f.number("norm_eps", 1e-5),
        theta=theta,
        local_theta=near,
        reach=f.whole("local_attention", 128) // 2,
        full_every=_full_every(f, layers),
        attention_bias=f.flag("attention_bias", False),
        mlp_bias=f.flag("mlp_bias", False),
        norm_bias=f.flag("norm_bias", False),
        head_bias=f.flag("classifier_bias", False),
        out_bias=f.flag("decoder_bias", True),
        classes=f.labels(2),
        head=_head(f),
        pool=f.one_of("classifier_pooling", "cls", {"cls": "cls", "mean": "mean"}),
        tied=f.flag("tie_word_embeddings", True),
    )


def _full_every(f: Fields, layers: int) -> int:
    """The first and each so-manieth of ModernBERT's layers behind it see everything."""
    every, kinds = f.whole("global_attn_every_n_layers", 3), f.data.get("layer_types")
    if kinds is None:
        return every
    if isinstance(kinds, list) and "full_attention" in kinds[1:]:
        every = kinds.index("full_attention", 1)
    else:
        every = layers
    usual = ["sliding_attention" if i % every else "full_attention" for i in range(layers)]
    if kinds != usual:
        raise f.bad("layer_types", f"{layers} words, full_attention first and at each n-th behind")
    return every


def _thetas(f: Fields) -> tuple[float, float]:
    """Rotary bases of ModernBERT's layers that see everything, and of the others."""
    nested = f.data.get("rope_parameters")
    tables = nested if isinstance(nested, dict) else {}
    thetas = []
    for kind, key, usual in (
        ("full_attention", "global_rope_theta", 160_000.0),
        ("sliding_attention", "local_rope_theta", 10_000.0),
    ):
        table = tables.get(kind)
        of_kind = Fields(f.path, table) if isinstance(table, dict) else f
        rescaled(f, of_kind.data if of_kind is not f else f.data.get("rope_scaling"))
        thetas.append(of_kind.number("rope_theta" if of_kind is not f else key, usual))
    return thetas[0], thetas[1]


def _whisper(f: Fields) -> tuple[Family, Any]:
    f.one_of("activation_function", "gelu", {"gelu": True})
    f.only("scale_embedding", False)
    encoder = f.layers("encoder_layers", 4)
    f.notes.append(
        "The encoder's positions are a table that does not train in the library: --freeze"
        " '*encoder.embed_positions.weight'."
    )
    return whisper.FAMILY, whisper.WhisperConfig(
        layers=encoder,
        decoder_layers=f.whole("decoder_layers", 4, limit=LAYERS_LIMIT),
        hidden=f.whole("d_model", 384),
        heads=f.whole("encoder_attention_heads", 6),
        decoder_heads=f.whole("decoder_attention_heads", 6),
        ff=f.whole("encoder_ffn_dim", 1536),
        decoder_ff=f.whole("decoder_ffn_dim", 1536),
        vocab=f.whole("vocab_size", 51865),
        bins=f.whole("num_mel_bins", 80),
        seq=f.whole("max_source_positions", 1500),
        target=f.length("max_target_positions", 448),
        positions=f.whole("max_target_positions", 448),
        tied=f.flag("tie_word_embeddings", True),
    )


ENCODERS: Mapping[str, Read] = {
    "bert": _bert,
    "camembert": _roberta(32005),
    "distilbert": _distilbert,
    "modernbert": _modernbert,
    "roberta": _roberta(50265),
    "whisper": _whisper,
    "xlm-roberta": _roberta(250002),
}
