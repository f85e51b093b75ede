"""What checkpoints call a parameter: names without what wraps a model, names that are tied, and
the tensors that a parameter may be a part of or a stack of (planner.interop.checkpoints.match)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

WRAPPERS = frozenset(
    {
        "model",
        "transformer",
        "bert",
        "roberta",
        "vit",
        "distilbert",
        "module",
        "language_model",
        "backbone",
        "gpt_neox",
    }
)
TIES = (
    ("wte.weight", "lm_head.weight"),
    ("embed_tokens.weight", "lm_head.weight"),
    (
        "embeddings.word_embeddings.weight",
        "cls.predictions.decoder.weight",
        "lm_head.decoder.weight",
        "vocab_projector.weight",
    ),
    ("embeddings.tok_embeddings.weight", "decoder.weight"),
    ("decoder.embed_tokens.weight", "proj_out.weight"),
    ("cls.predictions.bias", "cls.predictions.decoder.bias"),
    ("lm_head.bias", "lm_head.decoder.bias"),
    (
        "shared.weight",
        "encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
        "lm_head.weight",
    ),
)
"""Names, without wrappers, that hold one value in a model that ties them."""
_RENAMED = (
    (re.compile(r"(.*\battn)\.out_proj\.(weight|bias)"), r"\1.c_proj.\2"),
    (
        re.compile(r"cls\.predictions\.(?:transform\.)?(dense\.weight|dense\.bias|bias)"),
        r"lm_head.\1",
    ),  # RoBERTa
    (
        re.compile(r"cls\.predictions\.transform\.LayerNorm\.(weight|bias)"),
        r"lm_head.layer_norm.\1",
    ),
    (re.compile(r"(.*\bmlp)\.shared_experts\.(.*)"), r"\1.shared_expert.\2"),
    (re.compile(r"(.*\b)mlp\.gate\.weight"), r"\1block_sparse_moe.gate.weight"),
    (re.compile(r"(.*\b)mlp\.gate\.weight"), r"\1block_sparse_moe.router.layer.weight"),
    (re.compile(r"(.*\b)mlp\.gate\.weight"), r"\1block_sparse_moe.router.weight"),
    (
        re.compile(r"(.*\b)mlp\.gate\.e_score_correction_bias"),
        r"\1block_sparse_moe.e_score_correction_bias",
    ),  # MiniMax-M2
    (re.compile(r"(.*\bmlp)\.up_proj\.(weight|bias)"), r"\1.c_fc.\2"),  # StarCoder2
    (re.compile(r"(.*\bmlp)\.down_proj\.(weight|bias)"), r"\1.c_proj.\2"),
    (re.compile(r"(.*\bmlp)\.up_proj\.(weight|bias)"), r"\1.fc1.\2"),  # Phi-2
    (re.compile(r"(.*\bmlp)\.down_proj\.(weight|bias)"), r"\1.fc2.\2"),
    (re.compile(r"(.*\bself_attn)\.o_proj\.(weight|bias)"), r"\1.dense.\2"),
    (re.compile(r"norm\.(weight|bias)"), r"final_layernorm.\1"),
    (re.compile(r"(.*\b)block_sparse_moe\.gate\.weight"), r"\1mlp.gate.weight"),
    (re.compile(r"(.*\b)block_sparse_moe\.gate\.weight"), r"\1block_sparse_moe.router.weight"),
    (
        re.compile(r"(.*\b)block_sparse_moe\.gate\.weight"),
        r"\1block_sparse_moe.router.layer.weight",
    ),  # Granite
    (re.compile(r"(.*\b)mlp\.((?:gate|up|down)_proj\..*)"), r"\1feed_forward.\2"),  # Bamba
    (re.compile(r"(.*\b)post_attention_layernorm\.weight"), r"\1pre_ff_layernorm.weight"),
    (
        re.compile(
            r"(.*\b)(?:mlp|block_sparse_moe\.shared_experts|mlp\.shared_experts)\.down_proj\.weight"
        ),
        r"\1shared_mlp.output_linear.weight",
    ),
    (re.compile(r"h\.(\d+)\.attn\.(.*)"), r"decoder.layers.\1.self_attn.\2"),  # OPT
    (re.compile(r"h\.(\d+)\.ln_1\.(.*)"), r"decoder.layers.\1.self_attn_layer_norm.\2"),
    (re.compile(r"h\.(\d+)\.ln_2\.(.*)"), r"decoder.layers.\1.final_layer_norm.\2"),
    (re.compile(r"h\.(\d+)\.mlp\.c_fc\.(.*)"), r"decoder.layers.\1.fc1.\2"),
    (re.compile(r"h\.(\d+)\.mlp\.c_proj\.(.*)"), r"decoder.layers.\1.fc2.\2"),
    (re.compile(r"ln_f\.(.*)"), r"decoder.final_layer_norm.\1"),
    (re.compile(r"wte\.weight"), "decoder.embed_tokens.weight"),
    (re.compile(r"wpe\.weight"), "decoder.embed_positions.weight"),
    (re.compile(r"norm\.weight"), "norm_f.weight"),  # Nemotron-H
    (re.compile(r"embed_tokens\.weight"), "embeddings.weight"),
    (re.compile(r"norm\.weight"), "embedding_norm.weight"),  # LFM2
    (re.compile(r"(.*\b)input_layernorm\.weight"), r"\1operator_norm.weight"),
    (re.compile(r"(.*\b)post_attention_layernorm\.weight"), r"\1ffn_norm.weight"),
    (re.compile(r"(.*\bself_attn)\.([qk])_norm\.weight"), r"\1.\2_layernorm.weight"),
    (re.compile(r"(.*\bself_attn)\.o_proj\.weight"), r"\1.out_proj.weight"),
    (re.compile(r"(.*\b)block_sparse_moe\.gate\.weight"), r"\1feed_forward.gate.weight"),
    (
        re.compile(r"(.*\b)block_sparse_moe\.gate\.e_score_correction_bias"),
        r"\1feed_forward.expert_bias",
    ),
    (
        re.compile(r"encoder\.(layer\.\d+)\.attention\.self\.([qkv])(?:uery|ey|alue)\.(.*)"),
        r"\1.attention.\2_lin.\3",
    ),  # DistilBERT
    (
        re.compile(r"encoder\.(layer\.\d+)\.attention\.output\.dense\.(.*)"),
        r"\1.attention.out_lin.\2",
    ),
    (
        re.compile(r"encoder\.(layer\.\d+)\.attention\.output\.LayerNorm\.(.*)"),
        r"\1.sa_layer_norm.\2",
    ),
    (re.compile(r"encoder\.(layer\.\d+)\.intermediate\.dense\.(.*)"), r"\1.ffn.lin1.\2"),
    (re.compile(r"encoder\.(layer\.\d+)\.output\.dense\.(.*)"), r"\1.ffn.lin2.\2"),
    (re.compile(r"encoder\.(layer\.\d+)\.output\.LayerNorm\.(.*)"), r"\1.output_layer_norm.\2"),
    (re.compile(r"cls\.predictions\.transform\.dense\.(.*)"), r"vocab_transform.\1"),
    (re.compile(r"cls\.predictions\.transform\.LayerNorm\.(.*)"), r"vocab_layer_norm.\1"),
    (re.compile(r"cls\.predictions\.bias"), "vocab_projector.bias"),
    (re.compile(r"pooler\.dense\.(.*)"), r"pre_classifier.\1"),
    (re.compile(r"(.*\b)block_sparse_moe\.gate\.weight"), r"\1mlp.router.weight"),  # Phi-3.5-MoE
    (re.compile(r"(.*\b)mlp\.gate\.weight"), r"\1mlp.gate.wg.weight"),  # Hunyuan
    (re.compile(r"(.*\bmlp)\.shared_experts\.(.*)"), r"\1.shared_mlp.\2"),
    (re.compile(r"(.*\bself_attn)\.q_norm\.weight"), r"\1.query_layernorm.weight"),
    (re.compile(r"(.*\bself_attn)\.k_norm\.weight"), r"\1.key_layernorm.weight"),
    (re.compile(r"embed_tokens\.weight"), "wte.weight"),  # MPT
    (re.compile(r"layers\.(\d+)\.input_layernorm\.weight"), r"blocks.\1.norm_1.weight"),
    (re.compile(r"layers\.(\d+)\.post_attention_layernorm\.weight"), r"blocks.\1.norm_2.weight"),
    (re.compile(r"layers\.(\d+)\.self_attn\.o_proj\.weight"), r"blocks.\1.attn.out_proj.weight"),
    (re.compile(r"layers\.(\d+)\.mlp\.(up|down)_proj\.weight"), r"blocks.\1.ffn.\2_proj.weight"),
    (re.compile(r"(.*\b)mlp\.gate_proj\.weight"), r"\1feed_forward.w1.weight"),
    (re.compile(r"(.*\b)mlp\.up_proj\.weight"), r"\1feed_forward.w3.weight"),
    (re.compile(r"(.*\b)mlp\.down_proj\.weight"), r"\1feed_forward.w2.weight"),
    (re.compile(r"embed_tokens\.weight"), "embed_in.weight"),  # GPT-NeoX
    (re.compile(r"lm_head\.weight"), "embed_out.weight"),
    (re.compile(r"norm\.(weight|bias)"), r"final_layer_norm.\1"),
    (re.compile(r"(.*\b)self_attn\.o_proj\.(weight|bias)"), r"\1attention.dense.\2"),
    (re.compile(r"(.*\bmlp)\.up_proj\.(weight|bias)"), r"\1.dense_h_to_4h.\2"),
    (re.compile(r"(.*\bmlp)\.down_proj\.(weight|bias)"), r"\1.dense_4h_to_h.\2"),
    (re.compile(r"(.*\b)input_layernorm\.weight"), r"\1attention_layernorm.weight"),  # Apertus
    (re.compile(r"(.*\b)post_attention_layernorm\.weight"), r"\1feedforward_layernorm.weight"),
    (re.compile(r"(.*\b)self_attn\.q_norm\.weight"), r"\1attention.query_layernorm.weight"),  # Ling
    (re.compile(r"(.*\b)self_attn\.k_norm\.weight"), r"\1attention.key_layernorm.weight"),
    (re.compile(r"(.*\bmlp\.gate)\.e_score_correction_bias"), r"\1.expert_bias"),
    (re.compile(r"(.*\bmlp)\.gate\.e_score_correction_bias"), r"\1.e_score_correction_bias"),
    (re.compile(r"embed_tokens\.weight"), "word_embeddings.weight"),  # BLOOM
    (re.compile(r"embed_layernorm\.(.*)"), r"word_embeddings_layernorm.\1"),
    (re.compile(r"layers\.(\d+\.(?:input|post_attention)_layernorm\..*)"), r"h.\1"),
    (re.compile(r"layers\.(\d+)\.self_attn\.o_proj\.(.*)"), r"h.\1.self_attention.dense.\2"),
    (re.compile(r"layers\.(\d+)\.mlp\.up_proj\.(.*)"), r"h.\1.mlp.dense_h_to_4h.\2"),
    (re.compile(r"layers\.(\d+)\.mlp\.down_proj\.(.*)"), r"h.\1.mlp.dense_4h_to_h.\2"),
    (re.compile(r"norm\.(weight|bias)"), r"ln_f.\1"),
)
_HEADS = re.compile(r"(.*\battn)\.([qkv])_proj\.(weight|bias)")
_ROWS = re.compile(r"(.*\bself_attn)\.([qkv])_proj\.(weight|bias)")
_HALVES = re.compile(r"(.*\bmlp)\.(gate|up)_proj\.(weight|bias)")
_SHARED = re.compile(
    r"(.*?\b)(?:mlp|block_sparse_moe\.shared_experts|mlp\.shared_experts)\.(gate|up)_proj\.weight"
)
_OF_LAYER = re.compile(
    r"layers\.(\d+)\.((?:embed_tokens_per_layer|per_layer_model_projection)\.weight)"
)
"""Gemma 4: parts of what a checkpoint has once, of all layers."""
_PARTS = re.compile(r"(.*\b)(in_proj|conv1d)\.(z|x|b|c|dt)\.(weight|bias)")
_ORDERS = (("z", "x", "b", "c", "dt"), ("b", "c", "x"))
"""Rows of a state space's in_proj (its conv1d has the middle three), and of LFM2's."""
_EXPERTS = re.compile(
    r"(.*?\b)(?:(?:mlp|block_sparse_moe)\.)?experts\.(gate_proj|up_proj|down_proj|w1|w2|w3|gate_up_proj\.gate|gate_up_proj\.up)(?:\.weight)?"
)
_UNGATED = re.compile(r"(.*\bmixer\.experts)\.(up_proj|down_proj)\.weight")  # Nemotron-H
_ROLES = {
    "gate_proj": "w1",
    "gate_up_proj.gate": "w1",
    "up_proj": "w3",
    "gate_up_proj.up": "w3",
    "down_proj": "w2",
}
_PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


@dataclass(frozen=True, slots=True)
class Want:
    """A canonical name, and which of `parts` equal parts of its outputs; or whose rows they are, of
    queries, keys and values behind each other (keys and values are as many); or how many rows, from
    which on, of how many (`rows`), along dim `axis`. by_head: the parts are those of each head, one
    head behind the other."""

    name: str
    part: int = 0
    parts: int = 1
    rows_of: str = ""
    rows: tuple[int, int, int] | None = None
    axis: int = 0
    by_head: bool = False


def canonical(name: str) -> str:
    """A name without what wraps the model, gamma and beta of old checkpoints as weight and bias."""
    words = name.split(".")
    while len(words) > 1 and words[0] in WRAPPERS:
        words = words[1:]
    return ".".join([*words[:-1], {"gamma": "weight", "beta": "bias"}.get(words[-1], words[-1])])


def ties(name: str) -> list[str]:
    """Other parameters that a checkpoint may hold in the place of one: those it may be tied to."""
    return list(
        dict.fromkeys(other for group in TIES if name in group for other in group if other != name)
    )


def ways(name: str, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[list[Want]]:
    """What a parameter may be made of, the likeliest first. shapes: of all, by canonical name."""
    shape = shapes[name]
    yield [Want(name)]
    if part := _PARTS.fullmatch(name):
        yield from _rows_of_parts(part, shapes)
    if match := _OF_LAYER.fullmatch(name):
        alike = [n for n in shapes if _OF_LAYER.fullmatch(n) and n.endswith(match[2])]
        part_rows = (int(match[1]) * shape[-1], shape[-1], len(alike) * shape[-1])
        yield [Want(match[2], rows=part_rows, axis=int(match[2].startswith("embed")))]
    for pattern, to in _RENAMED:
        if pattern.fullmatch(name):
            yield [Want(pattern.sub(to, name))]
    if heads := _HEADS.fullmatch(name):
        queries, keys = (shapes.get(f"{heads[1]}.{n}_proj.{heads[3]}") for n in "qk")
        fused, fewer = f"{heads[1]}.c_attn.{heads[3]}", queries != keys  # StarCoder
        third = "qkv".index(heads[2])
        yield [Want(fused, rows_of=heads[2]) if fewer else Want(fused, third, 3)]
        yield [Want(f"{heads[1]}.Wqkv.{heads[3]}", third, 3)]  # ModernBERT
    if rows := _ROWS.fullmatch(name):
        yield [Want(f"{rows[1]}.qkv_proj.{rows[3]}", rows_of=rows[2])]
        block = rows[1].replace("layers.", "blocks.").removesuffix("self_attn")
        yield [Want(f"{block}attn.Wqkv.{rows[3]}", rows_of=rows[2])]  # MPT
        queries, keys = (shapes.get(f"{rows[1]}.{n}_proj.{rows[3]}") for n in "qk")
        block = rows[1].removesuffix("self_attn")
        wholes = f"{block}attention", f"{block.replace('layers.', 'h.')}self_attention"
        for whole in wholes if queries == keys else ():  # GPT-NeoX, BLOOM
            fused = f"{whole}.query_key_value.{rows[3]}"
            yield [Want(fused, "qkv".index(rows[2]), 3, by_head=True)]
        if queries != keys:  # Ling
            yield [Want(f"{block}attention.query_key_value.{rows[3]}", rows_of=rows[2])]
    if halves := _HALVES.fullmatch(name):
        yield [Want(f"{halves[1]}.gate_up_proj.{halves[3]}", int(halves[2] == "up"), 2)]
        yield [Want(f"{halves[1]}.Wi.{halves[3]}", int(halves[2] == "up"), 2)]  # ModernBERT
    if shared := _SHARED.fullmatch(name):
        yield [Want(f"{shared[1]}shared_mlp.input_linear.weight", int(shared[2] == "up"), 2)]
    if (experts := _EXPERTS.fullmatch(name)) and len(shape) == 3:
        role = _ROLES.get(experts[2], experts[2])
        for scope in ("block_sparse_moe.", "mlp.", "feed_forward.", ""):
            prefix = f"{experts[1]}{scope}experts"
            for word in (role, _PROJECTIONS[role]):
                yield [Want(f"{prefix}.{e}.{word}.weight") for e in range(shape[0])]
            yield [
                (
                    Want(f"{prefix}.down_proj")
                    if role == "w2"
                    else Want(f"{prefix}.gate_up_proj", int(role == "w3"), 2)
                )
            ]
        prefix = f"{experts[1]}block_sparse_moe"
        yield [
            Want(f"{prefix}.output_linear.weight")
            if role == "w2"
            else Want(f"{prefix}.input_linear.weight", int(role == "w3"), 2)
        ]
    if (plain := _UNGATED.fullmatch(name)) and len(shape) == 3:
        yield [Want(f"{plain[1]}.{e}.{plain[2]}.weight") for e in range(shape[0])]
        yield [Want(f"{plain[1]}.{plain[2]}")]
    for other in ties(name):
        yield [Want(other)]


def _rows_of_parts(
    part: re.Match[str], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[list[Want]]:
    """Rows of the one tensor that a checkpoint has of parts which the graph has apart."""
    scope, module, part_name, what = part.groups()
    products = module == "in_proj" and what == "weight"
    for order in _ORDERS:
        there = {p: shapes.get(f"{scope}{module}.{p}.{what}") for p in order}
        sizes = {
            p: s[-1] if products else s[0] for p, s in there.items() if s is not None and len(s)
        }
        if part_name in sizes and (module == "conv1d" or len(sizes) == len(order)):
            first = sum(n for p, n in sizes.items() if order.index(p) < order.index(part_name))
            rows = (first, sizes[part_name], sum(sizes.values()))
            yield [Want(f"{scope}{module}.{what}", rows=rows)]
