"""Forty other exports, for a look beyond the suite; made where they are wanted and not committed.

    python tests/front_door/more_graphs.py --out FOLDER [NAME...]
    python -m benchmarks.front_door FOLDER

Families, options and habits that the suite has not. It needs what make_graphs.py needs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.front_door.make_graphs import (
    BF16,
    CLASSES,
    DECODER,
    DEEPSEEK,
    ENCODER,
    EXPERTS,
    F16,
    FREE,
    GPT2,
    MLM,
    ROBERTA,
    SEQ,
    SEQ2SEQ,
    TS,
    VIT,
    WIDTH,
    Case,
    Made,
    hugging_face,
    main,
    recurrent,
    vision,
)


def plain(make: Callable[[Any], Any], **shapes: tuple[int, ...]) -> Callable[[Case], Made]:
    """A module of plain torch; inputs called ids are integers. The first dim is the batch."""

    def build(case: Case) -> Made:
        import torch

        named = {
            n: torch.randint(0, 50, (case.batch, *s)) if "ids" in n else torch.randn(case.batch, *s)
            for n, s in shapes.items()
        }
        return Made(make(torch.nn), named, {n: {0: "batch"} for n in named}, ("out",))

    return build


def module(nn: Any, forward: Callable[..., Any], **parts: Any) -> Any:
    """A module of these parts and this forward pass. The exporters read the signature, so inputs
    have names."""

    class Own(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part)

        def forward(self, *inputs: Any) -> Any:
            return forward(self, *inputs)

    return Own()


def encoder(nn: Any) -> Any:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True)
    return module(
        nn,
        lambda m, x: m.head(m.body(x)),
        body=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        head=nn.Linear(WIDTH, 8),
    )


def autoencoder(nn: Any) -> Any:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 4, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 3, 4, 2, 1),
    )


def depthwise(nn: Any) -> Any:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.Hardswish(),
        nn.Conv2d(16, 16, 3, padding=1, groups=16),
        nn.BatchNorm2d(16),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


def volumes(nn: Any) -> Any:
    return nn.Sequential(
        nn.Conv3d(1, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.MaxPool3d(2),
        nn.Flatten(),
        nn.Linear(8 * 64, 5),
    )


def mixer(nn: Any) -> Any:
    parts = {
        "a": nn.Linear(16, 32),
        "b": nn.Linear(32, 16),
        "c": nn.Linear(WIDTH, 64),
        "d": nn.Linear(64, WIDTH),
        "n": nn.LayerNorm(WIDTH),
        "o": nn.LayerNorm(WIDTH),
    }

    def forward(m: Any, x: Any) -> Any:
        x = x + m.b(nn.functional.gelu(m.a(m.n(x).transpose(1, 2)))).transpose(1, 2)
        return x + m.d(nn.functional.gelu(m.c(m.o(x))))

    return module(nn, forward, **parts)


def graph_network(nn: Any) -> Any:
    def forward(m: Any, nodes: Any, adjacency: Any) -> Any:
        weights = adjacency.softmax(-1)
        return m.b((weights @ m.a(nodes)).relu()).mean(1)

    return module(nn, forward, a=nn.Linear(16, WIDTH), b=nn.Linear(WIDTH, 4))


def factors(nn: Any) -> Any:
    def forward(m: Any, user_ids: Any, item_ids: Any) -> Any:
        return (m.users(user_ids) * m.items(item_ids)).sum(-1) + m.bias(user_ids).squeeze(-1)

    return module(
        nn,
        forward,
        users=nn.Embedding(64, 16),
        items=nn.Embedding(64, 16),
        bias=nn.Embedding(64, 1),
    )


def inside(nn: Any) -> Any:
    """The loss comes out of the module itself."""
    return module(
        nn,
        lambda m, x, y: nn.functional.mse_loss(m.net(x), y),
        net=nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)),
    )


def waves(nn: Any) -> Any:
    """Dilated convolutions with gates, as WaveNet has them."""
    parts = {
        "a": nn.Conv1d(8, 32, 3, padding=2, dilation=2),
        "b": nn.Conv1d(16, 8, 1),
        "c": nn.Conv1d(8, 4, 1),
    }

    def forward(m: Any, x: Any) -> Any:
        left, right = m.a(x).chunk(2, 1)
        return m.c(x + m.b(left.tanh() * right.sigmoid()))

    return module(nn, forward, **parts)


SWIN = {
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 8,
    "depths": [2, 2],
    "num_heads": [2, 2],
    "window_size": 4,
}
MOBILE = {"image_size": 32, "depth_multiplier": 0.25, "min_depth": 4, "depth_divisible_by": 4}
REGNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4}
NEOX = DECODER | {"rotary_pct": 0.5}
CASES = (
    Case(
        "opt_dynamo", "OPT", hugging_face("opt", **DECODER, ffn_dim=64, word_embed_proj_dim=WIDTH)
    ),
    Case("gpt_neox_torchscript", "GPT-NeoX", hugging_face("gpt_neox", **NEOX), **TS, **FREE),
    Case("gptj_dynamo_fp16", "GPT-J", hugging_face("gptj", **GPT2, rotary_dim=4), **F16),
    Case("gpt_bigcode_dynamo", "StarCoder", hugging_face("gpt_bigcode", **GPT2)),
    Case("falcon_dynamo_bf16", "Falcon", hugging_face("falcon", **DECODER), **BF16),
    Case("gemma2_dynamo", "Gemma", hugging_face("gemma2", **DECODER, head_dim=8, sliding_window=8)),
    Case("olmo2_dynamo_dynamic", "OLMo", hugging_face("olmo2", **DECODER), **FREE),
    Case("stablelm_torchscript", "StableLM", hugging_face("stablelm", **DECODER), **TS),
    Case("starcoder2_dynamo", "StarCoder", hugging_face("starcoder2", **DECODER), batch=3),
    Case("cohere_dynamo_bf16", "Cohere", hugging_face("cohere", **DECODER), **BF16),
    Case("granite_dynamo", "Granite", hugging_face("granite", **DECODER)),
    Case("smollm3_dynamo_batch1", "SmolLM", hugging_face("smollm3", **DECODER), batch=1),
    Case(
        "qwen2_moe_dynamo",
        "Qwen",
        hugging_face("qwen2_moe", **DECODER, **EXPERTS, shared_expert_intermediate_size=32),
    ),
    Case("qwen2_torchscript_dynamic", "Qwen", hugging_face("qwen2", **DECODER), **TS, **FREE),
    Case("deepseek_v2_dynamo", "DeepSeek", hugging_face("deepseek_v2", **DEEPSEEK)),
    Case(
        "llama_tied_dynamo_opset18",
        "Llama",
        hugging_face("llama", **DECODER, tie_word_embeddings=True),
        opset=18,
    ),
    Case(
        "distilbert_dynamo",
        "DistilBERT",
        hugging_face(
            "distilbert",
            MLM,
            vocab_size=96,
            dim=WIDTH,
            hidden_dim=64,
            n_layers=2,
            n_heads=4,
            max_position_embeddings=64,
        ),
    ),
    Case(
        "albert_torchscript",
        "ALBERT",
        hugging_face("albert", CLASSES, **ENCODER, embedding_size=16),
        **TS,
    ),
    Case(
        "electra_dynamo_dynamic",
        "ELECTRA",
        hugging_face("electra", CLASSES, **ENCODER, embedding_size=16),
        **FREE,
    ),
    Case(
        "deberta_v2_torchscript",
        "DeBERTa",
        hugging_face(
            "deberta-v2", CLASSES, **ENCODER, pos_att_type=["p2c", "c2p"], relative_attention=True
        ),
        **TS,
    ),
    Case(
        "xlm_roberta_torchscript_fp16",
        "XLM-R",
        hugging_face("xlm-roberta", CLASSES, **ROBERTA),
        **TS,
        **F16,
    ),
    Case(
        "modernbert_dynamo",
        "ModernBERT",
        hugging_face("modernbert", MLM, **ENCODER, local_attention=8),
    ),
    Case("mpnet_dynamo", "MPNet", hugging_face("mpnet", MLM, **ROBERTA)),
    Case("marian_dynamo", "Marian", hugging_face("marian", SEQ, **SEQ2SEQ)),
    Case("pegasus_torchscript", "Pegasus", hugging_face("pegasus", SEQ, **SEQ2SEQ), **TS),
    Case("deit_dynamo_dynamic", "DeiT", vision("deit", **VIT), **FREE),
    Case("beit_torchscript", "BEiT", vision("beit", **VIT), **TS),
    Case(
        "dinov2_dynamo",
        "DINOv2",
        vision(
            "dinov2",
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=32,
            patch_size=8,
        ),
    ),
    Case("swin_dynamo", "Swin", vision("swin", **SWIN)),
    Case(
        "convnextv2_torchscript",
        "ConvNeXt",
        vision("convnextv2", num_stages=2, hidden_sizes=[8, 16], depths=[1, 1]),
        **TS,
    ),
    Case("mobilenet_v2_dynamo", "MobileNet", vision("mobilenet_v2", **MOBILE)),
    Case("regnet_torchscript_dynamic", "RegNet", vision("regnet", **REGNET), **TS, **FREE),
    Case("torch_encoder_dynamo", "nn.TransformerEncoder", plain(encoder, x=(12, WIDTH))),
    Case(
        "torch_encoder_torchscript",
        "nn.TransformerEncoder",
        plain(encoder, x=(12, WIDTH)),
        **TS,
        **FREE,
    ),
    Case("autoencoder_dynamo_dynamic", "autoencoder", plain(autoencoder, x=(3, 16, 16)), **FREE),
    Case(
        "depthwise_train_mode", "depthwise", plain(depthwise, x=(3, 16, 16)), training=True, batch=4
    ),
    Case("volumes_torchscript", "3D convolution", plain(volumes, x=(1, 8, 8, 8)), **TS),
    Case("mixer_dynamo", "MLP-Mixer", plain(mixer, x=(16, WIDTH))),
    Case(
        "graph_network_dynamo",
        "graph network",
        plain(graph_network, nodes=(10, 16), adjacency=(10, 10)),
    ),
    Case(
        "factors_torchscript",
        "matrix factors",
        plain(factors, user_ids=(), item_ids=()),
        **TS,
        **FREE,
    ),
    Case("loss_inside_dynamo", "loss inside", plain(inside, x=(16,), y=(4,)), batch=8),
    Case("waves_dynamo", "WaveNet", plain(waves, x=(8, 20))),
    Case("rnn_torchscript", "RNN", recurrent("RNN", num_layers=2), **TS),
    Case("lstm_bidirectional_dynamo_fp16", "LSTM", recurrent("LSTM", bidirectional=True), **F16),
)


if __name__ == "__main__":
    sys.exit(main(CASES))
