"""Make the graphs of the front-door suite with the exporters that users have.
tests/front_door/README.md says how to run it.

    python tests/front_door/make_graphs.py [NAME...] [--out FOLDER] [--list]

Tiny models (two layers, widths of 32) come with weights, full-size ones without. Weights are seeded
and rounded to eight bits of mantissa, which gzip halves; nothing else is done to what the exporter
wrote. What a case is expected to do (`expect`) is kept in the manifest and never written here.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.metadata
import inspect
import json
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LIBRARIES = (
    "torch",
    "transformers",
    "diffusers",
    "timm",
    "onnxscript",
    "onnx",
    "jax",
    "flax",
    "jax2onnx",
)
MLM, CLASSES, SEQ, CAUSAL = (
    "AutoModelForMaskedLM",
    "AutoModelForSequenceClassification",
    "AutoModelForSeq2SeqLM",
    "AutoModelForCausalLM",
)
VOCABULARY, WIDTH, TOKENS = 96, 32, 16
DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK = DECODER | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "n_shared_experts": 1,
}
SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


@dataclass(frozen=True)
class Made:
    """A model, its example inputs by name, the dims of each that are free, and the names of its
    outputs."""

    module: Any
    inputs: dict[str, Any]
    free: dict[str, dict[int, str]] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("logits",)


@dataclass(frozen=True)
class Case:
    """A graph: which model, which exporter with which options."""

    name: str
    family: str
    build: Callable[[Case], Made]
    exporter: str = "dynamo"
    dtype: str = "float32"
    dynamic: bool = False
    named: bool = True
    """Free dims have the user's names; otherwise what torch calls them, such as s35, the batch of
    each input by another."""
    batch: int = 2
    opset: int = 20
    training: bool = False
    weights: bool = True


def hugging_face(
    kind: str, auto: str = CAUSAL, experts: str = "batched_mm", **settings: Any
) -> Callable[[Case], Made]:
    """A language model of transformers, from a configuration made small; logits alone come out."""

    def build(case: Case) -> Made:
        import torch
        import transformers

        config = transformers.AutoConfig.for_model(kind, **settings)
        if "expert" in str(settings):
            config._experts_implementation = experts
        # What the library picks, but for two that cannot be exported so: TorchScript's fused form,
        # and T5's by dynamo.
        attention = (
            {"attn_implementation": "eager"}
            if case.exporter == "torchscript" or kind == "t5"
            else {}
        )
        model = getattr(transformers, auto).from_config(config, **attention)
        ids = torch.randint(3, VOCABULARY, (case.batch, TOKENS))
        named = {"input_ids": ids}
        # Without a mask transformers looks for packed sequences, by an operator that the
        # TorchScript exporter has not.
        if auto in (MLM, CLASSES) or (
            auto == CAUSAL
            and (case.exporter == "torchscript" or (case.dynamic and kind in ("gpt2", "llama")))
        ):
            named["attention_mask"] = torch.ones_like(ids)
        if config.is_encoder_decoder:
            named["decoder_input_ids"] = ids[:, :12].clone()
        free = {n: {0: "batch", 1: "target" if n.startswith("decoder") else "seq"} for n in named}
        return Made(first(model, tuple(named), use_cache=False), named, free)

    return build


def first(model: Any, names: tuple[str, ...], **constants: Any) -> Any:
    """The model as a function of tensors that returns its first output: what users write round a
    library's model before they export it."""
    import torch

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *inputs: Any) -> Any:
            takes = inspect.signature(self.model.forward).parameters
            return self.model(
                **dict(zip(names, inputs, strict=True)),
                **{k: v for k, v in constants.items() if k in takes},
                return_dict=False,
            )[0]

    return Logits()


def whisper(case: Case) -> Made:
    import torch
    import transformers

    config = transformers.WhisperConfig(
        **SEQ2SEQ,
        num_mel_bins=16,
        max_source_positions=32,
        max_target_positions=32,
        begin_suppress_tokens=None,
        suppress_tokens=None,
    )
    model = transformers.WhisperForConditionalGeneration._from_config(
        config, attn_implementation="eager"
    )
    named = {
        "input_features": torch.randn(case.batch, 16, 64),
        "decoder_input_ids": torch.randint(3, VOCABULARY, (case.batch, 12)),
    }
    if case.exporter == "torchscript":
        named["decoder_attention_mask"] = torch.ones_like(named["decoder_input_ids"])
    return Made(
        first(model, tuple(named), use_cache=False),
        named,
        {n: {0: "batch"} | ({1: "target"} if n.startswith("decoder") else {}) for n in named},
    )


def vision(kind: str, **settings: Any) -> Callable[[Case], Made]:
    """A classifier of images from transformers."""

    def build(case: Case) -> Made:
        import torch
        import transformers

        model = transformers.AutoModelForImageClassification.from_config(
            transformers.AutoConfig.for_model(kind, num_labels=10, **settings)
        )
        return Made(
            first(model, ("pixel_values",)),
            {"pixel_values": torch.randn(case.batch, 3, 32, 32)},
            {"pixel_values": {0: "batch"}},
        )

    return build


VIT = {
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}


def clip(case: Case) -> Made:
    import torch
    import transformers

    config = transformers.CLIPConfig(
        text_config=ENCODER | {"projection_dim": 16, "eos_token_id": 2},
        vision_config=VIT | {"projection_dim": 16},
        projection_dim=16,
    )
    model = transformers.CLIPModel._from_config(config, attn_implementation="eager")
    ids = torch.randint(3, VOCABULARY, (case.batch, TOKENS))
    ids[:, -1] = 2
    named = {
        "input_ids": ids,
        "pixel_values": torch.randn(case.batch, 3, 32, 32),
        "attention_mask": torch.ones_like(ids),
    }
    return Made(
        first(model, tuple(named)),
        named,
        {"input_ids": {0: "batch"}, "pixel_values": {0: "batch"}, "attention_mask": {0: "batch"}},
        ("logits_per_image",),
    )


def unet(case: Case) -> Made:
    import diffusers
    import torch

    sizes = {
        "sample_size": 8,
        "in_channels": 4,
        "out_channels": 4,
        "layers_per_block": 1,
        "block_out_channels": (8, 16),
        "norm_num_groups": 4,
        "attention_head_dim": 4,
    }
    blocks = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    model = diffusers.UNet2DConditionModel(**sizes, **blocks, cross_attention_dim=16)
    model.set_attn_processor(diffusers.models.attention_processor.AttnProcessor())
    named = {
        "sample": torch.randn(case.batch, 4, 8, 8),
        "timestep": torch.randint(0, 8, (case.batch,)),
        "encoder_hidden_states": torch.randn(case.batch, 8, 16),
    }
    return Made(first(model, tuple(named)), named, {n: {0: "batch"} for n in named}, ("noise",))


def dit(case: Case) -> Made:
    import diffusers
    import torch

    sizes = {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "sample_size": 8,
        "patch_size": 2,
    }
    model = diffusers.DiTTransformer2DModel(**sizes, num_embeds_ada_norm=10)
    named = {
        "hidden_states": torch.randn(case.batch, 4, 8, 8),
        "timestep": torch.randint(0, 8, (case.batch,)),
        "class_labels": torch.randint(0, 8, (case.batch,)),
    }
    return Made(first(model, tuple(named)), named, {n: {0: "batch"} for n in named}, ("noise",))


def recurrent(kind: str, **settings: Any) -> Callable[[Case], Made]:
    """Convolution over frames, a recurrent net, a linear layer: speech as users write it in plain
    torch."""

    def build(case: Case) -> Made:
        import torch
        from torch import nn

        class Speech(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv, self.norm = nn.Conv1d(16, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH)
                self.rnn = getattr(nn, kind)(WIDTH, WIDTH, batch_first=True, **settings)
                self.head = nn.Linear(WIDTH * (2 if settings.get("bidirectional") else 1), 10)

            def forward(self, frames: Any) -> Any:
                x = torch.relu(self.norm(self.conv(frames)))
                return self.head(self.rnn(x.transpose(1, 2))[0])

        return Made(Speech(), {"frames": torch.randn(case.batch, 16, 12)}, {"frames": {0: "batch"}})

    return build


def two_towers(case: Case) -> Made:
    import torch
    from torch import nn

    class Towers(nn.Module):
        """Users and items scored against each other, with two losses."""

        def __init__(self) -> None:
            super().__init__()
            self.users, self.items = nn.Embedding(64, WIDTH), nn.Embedding(128, WIDTH)
            self.user, self.item = (
                nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 16)) for _ in "ab"
            )
            self.rating = nn.Linear(32, 1)

        def forward(self, user: Any, history: Any, rating: Any) -> Any:
            u, i = self.user(self.users(user)), self.item(self.items(history).mean(1))
            scores = u @ i.T
            contrast = nn.functional.cross_entropy(scores, torch.arange(scores.shape[0]))
            regression = ((self.rating(torch.cat([u, i], -1)).squeeze(-1) - rating) ** 2).mean()
            return contrast, regression, scores

    named = {
        "user": torch.randint(0, 64, (case.batch,)),
        "history": torch.randint(0, 128, (case.batch, 5)),
        "rating": torch.randn(case.batch),
    }
    return Made(
        Towers(),
        named,
        {n: {0: "batch"} for n in named},
        ("loss_contrast", "loss_rating", "scores"),
    )


def embedding_bag(case: Case) -> Made:
    import torch
    from torch import nn

    class Clicks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.mlp = (
                nn.EmbeddingBag(200, 16, mode="sum"),
                nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 1)),
            )

        def forward(self, ids: Any, dense: Any) -> Any:
            return self.mlp(torch.cat([self.bag(ids), dense], -1))

    named = {"ids": torch.randint(0, 200, (case.batch, 6)), "dense": torch.randn(case.batch, 8)}
    return Made(Clicks(), named, {n: {0: "batch"} for n in named})


def alibi(case: Case) -> Made:
    import torch
    from torch import nn

    class Block(nn.Module):
        """Attention whose scores are lowered by distance, as written by hand."""

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.qkv, self.out = (
                nn.LayerNorm(WIDTH),
                nn.Linear(WIDTH, 3 * WIDTH),
                nn.Linear(WIDTH, WIDTH),
            )
            self.mlp = nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)
            )
            self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.125, 0.0625]))

        def forward(self, x: Any) -> Any:
            b, s, _ = x.shape
            q, k, v = (
                t.view(b, s, 4, WIDTH // 4).transpose(1, 2)
                for t in self.qkv(self.norm(x)).chunk(3, -1)
            )
            places = torch.arange(s)
            away = (places[None, :] - places[:, None]).float()
            scores = q @ k.transpose(-1, -2) / (WIDTH // 4) ** 0.5 + self.slopes[:, None, None].to(
                x.dtype
            ) * away.to(x.dtype)
            scores = scores.masked_fill(away > 0, torch.finfo(x.dtype).min)
            x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, WIDTH))
            return x + self.mlp(x)

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks = (
                nn.Embedding(VOCABULARY, WIDTH),
                nn.ModuleList(Block() for _ in range(2)),
            )
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

        def forward(self, input_ids: Any) -> Any:
            x = self.embed(input_ids)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    return Made(
        Decoder(),
        {"input_ids": torch.randint(0, VOCABULARY, (case.batch, TOKENS))},
        {"input_ids": {0: "batch", 1: "seq"}},
    )


def mlp(case: Case) -> Made:
    import torch
    from torch import nn

    layers = nn.Sequential(
        nn.Linear(16, 64),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(64, 64),
        nn.GELU(),
        nn.Linear(64, 4),
    )
    return Made(layers, {"x": torch.randn(case.batch, 16)}, {"x": {0: "batch"}})


def cached(kind: str, settings: dict[str, Any]) -> Callable[[Case], Made]:
    """A decoder with its cache as inputs, as examples/export_hf.py --cache makes it."""

    def build(case: Case) -> Made:
        import transformers

        sys.path.insert(0, str(HERE.parents[1]))
        from examples import export_hf

        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(kind, **settings)
        )
        named = export_hf.cache_inputs(model, case.batch, TOKENS)
        past = [n for n in named if n.startswith("past")]
        free = (
            {n: {0: "batch", 1: "seq"} for n in named}
            | {n: {0: "batch", 2: "past"} for n in past}
            | {"attention_mask": {0: "batch", 1: "total"}}
        )
        return Made(
            export_hf.cached(model, list(named)),
            named,
            free,
            ("logits", *(n.replace("past_key_values", "present") for n in past)),
        )

    return build


def full_size(kind: str, auto: str, tokens: int = 1024, **settings: Any) -> Callable[[Case], Made]:
    """A model of a published size, whose weights are never written: see export_full."""

    def build(case: Case) -> Made:
        import torch
        import transformers

        from examples import export_hf

        config = transformers.AutoConfig.for_model(
            kind, architectures=[auto], dtype=getattr(torch, case.dtype), **settings
        )
        previous = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, case.dtype))
        try:
            model = export_hf.make_model(config)
        finally:
            torch.set_default_dtype(previous)
        return Made(
            model,
            {
                n: v.to(getattr(torch, case.dtype)) if v.is_floating_point() else v
                for n, v in export_hf.example_inputs(model, case.batch, tokens).items()
            },
        )

    return build


def flax_mlp(case: Case) -> Made:
    import jax
    from flax import nnx

    class Perceptron(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.a, self.b = nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 8, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.b(jax.nn.gelu(self.a(x)))

    return Made(Perceptron(nnx.Rngs(0)), {"x": ("B" if case.dynamic else case.batch, 16)})


def flax_cnn(case: Case) -> Made:
    import jax
    from flax import nnx

    class Images(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.a, self.b, self.c = (
                nnx.Conv(3, 8, (3, 3), rngs=rngs),
                nnx.Conv(8, 16, (3, 3), strides=2, rngs=rngs),
                nnx.Linear(16, 10, rngs=rngs),
            )

        def __call__(self, x: Any) -> Any:
            return self.c(jax.nn.relu(self.b(jax.nn.relu(self.a(x)))).mean((1, 2)))

    return Made(Images(nnx.Rngs(0)), {"x": (case.batch, 16, 16, 3)})


def flax_transformer(case: Case) -> Made:
    import jax.numpy as jnp
    from flax import nnx

    class Encoder(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.embed, self.places = (
                nnx.Embed(VOCABULARY, WIDTH, rngs=rngs),
                nnx.Param(jnp.full((TOKENS, WIDTH), 0.5)),
            )
            self.attention = nnx.List(
                [nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs) for _ in range(2)]
            )
            self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(4)])
            self.up, self.down = (
                nnx.List([nnx.Linear(*s, rngs=rngs) for _ in range(2)])
                for s in ((WIDTH, 64), (64, WIDTH))
            )
            self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

        def __call__(self, ids: Any) -> Any:
            x = self.embed(ids) + self.places[...]
            for i in range(2):
                x = x + self.attention[i](self.norms[2 * i](x))
                x = x + self.down[i](nnx.gelu(self.up[i](self.norms[2 * i + 1](x))))
            return self.head(x)

    return Made(Encoder(nnx.Rngs(0)), {"ids": (case.batch, TOKENS)})


T5 = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
ROBERTA = ENCODER | {"max_position_embeddings": 66, "pad_token_id": 1}
BLOOM = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": 2, "n_head": 4}
MAMBA = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "state_size": 8,
    "time_step_rank": 4,
    "use_mambapy": False,
}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
CONVNEXT = {"num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1], "patch_size": 4}
LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
QWEN_8B = LLAMA_8B | {
    "vocab_size": 151936,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "head_dim": 128,
}
LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}
TS, F16, BF16 = (
    {"exporter": "torchscript", "opset": 17},
    {"dtype": "float16"},
    {"dtype": "bfloat16"},
)
FREE: dict[str, Any] = {"dynamic": True}
FULL: dict[str, Any] = {"batch": 8, "weights": False}
CASES = (
    Case("gpt2_dynamo_dynamic", "GPT-2", hugging_face("gpt2", **GPT2), **FREE),
    Case("gpt2_torchscript_dynamic", "GPT-2", hugging_face("gpt2", **GPT2), **TS, **FREE),
    Case("gpt2_dynamo_fp16_batch1", "GPT-2", hugging_face("gpt2", **GPT2), **F16, batch=1),
    Case("gpt2_dynamo_cache", "GPT-2", cached("gpt2", GPT2), **FREE, named=False),
    Case("llama_dynamo_bf16", "Llama", hugging_face("llama", **DECODER), **BF16),
    Case("llama_dynamo_dynamic", "Llama", hugging_face("llama", **DECODER), **FREE),
    Case("llama_dynamo_symbols", "Llama", hugging_face("llama", **DECODER), **FREE, named=False),
    Case("llama_torchscript_dynamic", "Llama", hugging_face("llama", **DECODER), **TS, **FREE),
    Case(
        "llama_torchscript_fp16_batch1",
        "Llama",
        hugging_face("llama", **DECODER),
        **TS,
        **F16,
        batch=1,
    ),
    Case("llama_dynamo_cache", "Llama", cached("llama", DECODER), **FREE, named=False),
    Case(
        "llama_dynamo_opset23_batch4", "Llama", hugging_face("llama", **DECODER), opset=23, batch=4
    ),
    Case("qwen2_dynamo_bf16_dynamic", "Qwen", hugging_face("qwen2", **DECODER), **BF16, **FREE),
    Case("qwen3_torchscript", "Qwen", hugging_face("qwen3", **DECODER, head_dim=8), **TS),
    Case("gemma_dynamo_bf16", "Gemma", hugging_face("gemma", **DECODER, head_dim=8), **BF16),
    Case(
        "gemma3_dynamo_sliding",
        "Gemma",
        hugging_face(
            "gemma3_text",
            **DECODER,
            head_dim=8,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
        ),
    ),
    Case("phi_dynamo_dynamic", "Phi", hugging_face("phi", **DECODER), **FREE),
    Case("phi3_torchscript_fp16", "Phi", hugging_face("phi3", **DECODER), **TS, **F16),
    Case(
        "mistral_dynamo_bf16_sliding",
        "Mistral",
        hugging_face("mistral", **DECODER, sliding_window=8),
        **BF16,
    ),
    Case(
        "mistral_torchscript_sliding",
        "Mistral",
        hugging_face("mistral", **DECODER, sliding_window=8),
        **TS,
    ),
    Case(
        "mixtral_dynamo",
        "Mixtral",
        hugging_face("mixtral", **DECODER, num_local_experts=4, num_experts_per_tok=2),
    ),
    Case(
        "mixtral_dynamo_bf16",
        "Mixtral",
        hugging_face("mixtral", **DECODER, num_local_experts=4, num_experts_per_tok=2),
        **BF16,
    ),
    Case(
        "mixtral_torchscript",
        "Mixtral",
        hugging_face(
            "mixtral", experts="eager", **DECODER, num_local_experts=4, num_experts_per_tok=2
        ),
        **TS,
    ),
    Case(
        "mixtral_torchscript_batched_mm",
        "Mixtral",
        hugging_face("mixtral", **DECODER, num_local_experts=4, num_experts_per_tok=2),
        **TS,
    ),
    Case("deepseek_v3_dynamo", "DeepSeek", hugging_face("deepseek_v3", **DEEPSEEK)),
    Case(
        "qwen3_moe_dynamo_bf16",
        "Qwen",
        hugging_face("qwen3_moe", **DECODER, **EXPERTS, head_dim=8),
        **BF16,
    ),
    Case("bert_dynamo_dynamic", "BERT", hugging_face("bert", MLM, **ENCODER), **FREE),
    Case(
        "bert_torchscript_classes", "BERT", hugging_face("bert", CLASSES, **ENCODER), **TS, **FREE
    ),
    Case("bert_dynamo_fp16_batch1", "BERT", hugging_face("bert", MLM, **ENCODER), **F16, batch=1),
    Case("roberta_dynamo_bf16", "RoBERTa", hugging_face("roberta", MLM, **ROBERTA), **BF16),
    Case(
        "roberta_torchscript_dynamic",
        "RoBERTa",
        hugging_face("roberta", CLASSES, **ROBERTA),
        **TS,
        **FREE,
    ),
    Case("t5_dynamo", "T5", hugging_face("t5", SEQ, **T5)),
    Case("t5_torchscript_dynamic", "T5", hugging_face("t5", SEQ, **T5), **TS, **FREE),
    Case("bart_dynamo_bf16", "BART", hugging_face("bart", SEQ, **SEQ2SEQ), **BF16),
    Case("bart_torchscript_dynamic", "BART", hugging_face("bart", SEQ, **SEQ2SEQ), **TS, **FREE),
    Case("whisper_dynamo", "Whisper", whisper),
    Case("whisper_torchscript_dynamic", "Whisper", whisper, **TS, **FREE),
    Case("vit_dynamo_bf16_batch1", "ViT", vision("vit", **VIT), **BF16, batch=1),
    Case("vit_torchscript_dynamic", "ViT", vision("vit", **VIT), **TS, **FREE),
    Case("clip_dynamo", "CLIP", clip),
    Case("clip_torchscript_dynamic", "CLIP", clip, **TS, **FREE),
    Case("convnext_dynamo_dynamic", "ConvNeXt", vision("convnext", **CONVNEXT), **FREE),
    Case("resnet_dynamo_train_mode", "ResNet", vision("resnet", **RESNET), training=True, batch=8),
    Case("resnet_torchscript_dynamic", "ResNet", vision("resnet", **RESNET), **TS, **FREE),
    Case("unet_dynamo", "UNet", unet),
    Case("unet_torchscript_dynamic", "UNet", unet, **TS, **FREE),
    Case("dit_dynamo_bf16", "DiT", dit, **BF16),
    Case("mamba_dynamo", "Mamba", hugging_face("mamba", **MAMBA)),
    Case("mamba_torchscript", "Mamba", hugging_face("mamba", **MAMBA), **TS),
    Case("gru_dynamo_bidirectional", "GRU", recurrent("GRU", num_layers=2, bidirectional=True)),
    Case(
        "gru_torchscript_dynamic",
        "GRU",
        recurrent("GRU", num_layers=2, bidirectional=True),
        **TS,
        **FREE,
    ),
    Case("lstm_dynamo", "LSTM", recurrent("LSTM")),
    Case("lstm_torchscript_dynamic", "LSTM", recurrent("LSTM", num_layers=2), **TS, **FREE),
    Case("two_towers_dynamo", "two towers", two_towers, batch=8),
    Case("embedding_bag_dynamo", "EmbeddingBag", embedding_bag, batch=4),
    Case("embedding_bag_torchscript", "EmbeddingBag", embedding_bag, **TS, batch=4),
    Case("alibi_dynamo_bf16_dynamic", "ALiBi", alibi, **BF16, **FREE),
    Case("bloom_dynamo", "ALiBi", hugging_face("bloom", **BLOOM)),
    Case("mlp_dynamo_train_mode", "MLP", mlp, training=True, batch=4),
    Case("flax_mlp_dynamic", "flax", flax_mlp, "jax2onnx", dynamic=True, opset=21),
    Case("flax_cnn", "flax", flax_cnn, "jax2onnx", opset=21),
    Case("flax_transformer", "flax", flax_transformer, "jax2onnx", opset=21),
    Case(
        "full_llama3_8b_bf16",
        "Llama",
        full_size("llama", "LlamaForCausalLM", **LLAMA_8B),
        **BF16,
        **FULL,
    ),
    Case(
        "full_mixtral_8x7b_bf16",
        "Mixtral",
        full_size("mixtral", "MixtralForCausalLM"),
        **BF16,
        **FULL,
    ),
    Case("full_bert_large", "BERT", full_size("bert", "BertForMaskedLM", 512, **LARGE), **FULL),
    Case(
        "full_gpt2_xl_fp16",
        "GPT-2",
        full_size("gpt2", "GPT2LMHeadModel", n_embd=1600, n_layer=48, n_head=25),
        **F16,
        **FULL,
    ),
    Case(
        "full_qwen3_8b_bf16",
        "Qwen",
        full_size("qwen3", "Qwen3ForCausalLM", **QWEN_8B),
        **BF16,
        **FULL,
    ),
    Case(
        "full_vit_large_bf16",
        "ViT",
        full_size("vit", "ViTForImageClassification", **LARGE),
        **BF16,
        **FULL,
    ),
)


def export_torch(case: Case, made: Made, path: Path) -> None:
    """The usual call of torch's exporters; weights and floating inputs in the type of the case."""
    import torch

    dtype = getattr(torch, case.dtype)
    model = made.module.to(dtype).train(case.training)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(torch.bfloat16))
    inputs = {n: v.to(dtype) if v.is_floating_point() else v for n, v in made.inputs.items()}
    names: dict[str, Any] = {
        "input_names": list(inputs),
        "output_names": list(made.outputs),
        "opset_version": case.opset,
    }
    if case.training:
        names["training"] = torch.onnx.TrainingMode.TRAINING
    if case.exporter == "torchscript":
        free = {"dynamic_axes": made.free} if case.dynamic else {}
        torch.onnx.export(
            model,
            tuple(inputs.values()),
            str(path),
            dynamo=False,
            do_constant_folding=not case.training,
            **free,
            **names,
        )
    else:
        dims = tuple(
            {i: n if case.named else torch.export.Dim.DYNAMIC for i, n in made.free[name].items()}
            for name in inputs
        )
        variadic = any(
            p.kind is p.VAR_POSITIONAL for p in inspect.signature(model.forward).parameters.values()
        )
        free = {"dynamic_shapes": (dims,) if variadic else dims} if case.dynamic else {}
        torch.onnx.export(
            model,
            tuple(inputs.values()),
            str(path),
            dynamo=True,
            external_data=False,
            verbose=False,
            **free,
            **names,
        )


def export_full(case: Case, made: Made, path: Path) -> None:
    """examples/export_hf.py: parameters are never written, and in the file they are references into
    a weights.bin that is not there."""
    from examples import export_hf

    exported = export_hf.export(made.module, made.inputs, case.opset)
    export_hf.drop_weights(exported, made.module)
    export_hf.write(exported, path)


def export_jax(case: Case, made: Made, path: Path) -> None:
    """jax2onnx of a flax module; inputs are shapes, of integers where they are called ids."""
    import jax
    import jax.numpy as jnp
    import jax2onnx

    given = [
        jax.ShapeDtypeStruct(tuple(s), jnp.int32) if n == "ids" else s
        for n, s in made.inputs.items()
    ]
    jax2onnx.to_onnx(
        made.module, given, opset=case.opset, return_mode="file", output_path=str(path)
    )


def seeded() -> None:
    """The same weights and inputs for a case, whatever was made before it."""
    try:
        import torch
    except ImportError:
        return  # the environment of jax2onnx; flax takes its seed as an argument
    torch.manual_seed(0)


def make(case: Case, folder: Path) -> dict[str, Any]:
    """Write one graph, compressed; returns its entry of the manifest."""
    import onnx

    seeded()
    made = case.build(case)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / f"{case.name}.onnx"
        (
            export_full
            if not case.weights
            else export_jax
            if case.exporter == "jax2onnx"
            else export_torch
        )(case, made, path)
        content = path.read_bytes()
    proto = onnx.load_from_string(content)
    packed = gzip.compress(content, 9, mtime=0)
    (folder / f"{case.name}.onnx.gz").write_bytes(packed)
    return {
        "family": case.family,
        "exporter": case.exporter,
        "dtype": case.dtype,
        "dynamic": case.dynamic,
        "batch": case.batch,
        "training": case.training,
        "opset": case.opset,
        "weights": "inside" if case.weights else "absent",
        "bytes": len(content),
        "packed_bytes": len(packed),
        "nodes": len(proto.graph.node),
        "made_with": {n: v for n in LIBRARIES if (v := version(n))},
        "inputs": {
            i.name: [d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim]
            for i in proto.graph.input
        },
    }


def version(library: str) -> str | None:
    """The installed version, if it is there."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def chosen(names: list[str], cases: tuple[Case, ...] = CASES) -> Iterator[Case]:
    """The cases named, or all that the libraries here can make."""
    flax = version("jax2onnx") is not None
    yield from (
        c for c in cases if (c.name in names if names else (c.exporter == "jax2onnx") == flax)
    )


def main(cases: tuple[Case, ...] = CASES) -> int:
    """Make graphs and note them in the manifest; returns how many could not be made."""
    p = argparse.ArgumentParser(
        description="Make the graphs of the front-door suite.", allow_abbrev=False
    )
    p.add_argument("names", nargs="*", help="these and no others")
    p.add_argument("--out", type=Path, default=HERE / "graphs")
    p.add_argument("--list", action="store_true", help="names, and leave")
    args = p.parse_args()
    if args.list:
        print(*(c.name for c in cases), sep="\n")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(HERE.parents[1]))
    manifest, failed = args.out / "manifest.json", 0
    for case in chosen(args.names, cases):
        entries = json.loads(manifest.read_text()) if manifest.exists() else {}
        try:
            entry = make(case, args.out)
        except Exception:  # one exporter's trouble is not the next one's
            traceback.print_exc()
            print(f"FAILED {case.name}", file=sys.stderr)
            failed += 1
            continue
        entries[case.name] = {"expect": {}} | entries.get(case.name, {}) | entry
        manifest.write_text(json.dumps(dict(sorted(entries.items())), indent=1) + "\n")
        print(
            f"{case.name}: {entry['nodes']} nodes, {entry['packed_bytes']:,} bytes", file=sys.stderr
        )
    return failed


if __name__ == "__main__":
    sys.exit(main())
