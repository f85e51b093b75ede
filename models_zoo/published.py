"""What papers and model cards say of the models that presets are named after, each with its source.

Every row is held against the planner's own count within `within`, 1 % unless the figure was
published with two digits only.

    parameters      of the model as it is trained; running statistics of norms aside
    active          parameters that a token passes, tables included
    flops           forward, one sample, multiply-adds times 2 (sources that call a multiply-add a
                    FLOP are doubled, and say so)
    flops/token     forward, without attention's scores: training compute over tokens over 3, as the
                    sources count it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_MEGATRON = (
    "Narayanan et al. 2021, Efficient large-scale language model training on GPU clusters using"
    " Megatron-LM, table 1"
)
_GPT3 = "Brown et al. 2020, Language models are few-shot learners, table D.1"
_LLAMA3 = "Grattafiori et al. 2024, The Llama 3 herd of models, section 3"
_CARD = "the model's card on Hugging Face"
_HUB = "the count of its files on the Hugging Face hub"
_GEMMA2 = "Gemma team 2024, Gemma 2, table 2: embeddings and the rest"
_GEMMA3 = "Gemma team 2025, Gemma 3, table 1: embeddings and the rest, without the image encoder"
_OPENAI = "OpenAI 2025, gpt-oss model card, table 1"
_QWEN3 = "Qwen team 2025, Qwen3, abstract and model cards"
_MIXTRAL = "Mistral AI, release notes of the model"
_VISION = "torchvision, table of weights (multiply-adds)"
_MODERN = "Warner et al. 2024, ModernBERT, section 2.3"
_DIT = "Peebles and Xie 2023, Scalable diffusion models with transformers, table 4 (multiply-adds)"


@dataclass(frozen=True)
class Published:
    """One figure of one preset (with options)."""

    spec: str
    what: Literal["parameters", "active", "flops", "flops/token"]
    value: float
    source: str
    within: float = 0.01


PUBLISHED = (
    Published("gpt2-small", "parameters", 124e6, "openai/gpt-2, README"),
    Published("gpt2-xl", "parameters", 1558e6, "openai/gpt-2, README"),
    Published("gpt3-175b", "parameters", 174_600e6, _GPT3),
    Published("gpt3-175b", "flops/token", 3.14e23 / 300e9 / 3, _GPT3),
    Published("megatron-530b", "parameters", 529.6e9, _MEGATRON),
    Published("gpt-1t", "parameters", 1008.0e9, _MEGATRON),
    Published("llama3-8b", "parameters", 8.03e9, _CARD),
    Published("llama3-70b", "parameters", 70.6e9, _CARD),
    Published("llama3-405b", "parameters", 405e9, _LLAMA3),
    Published("llama3-405b", "flops/token", 3.8e25 / 15.6e12 / 3, _LLAMA3),
    Published("mistral-7b", "parameters", 7.24e9, _CARD),
    Published("mixtral-8x7b", "parameters", 46.7e9, _MIXTRAL),
    Published("mixtral-8x7b", "active", 12.9e9, _MIXTRAL),
    Published("mixtral-8x22b", "parameters", 141e9, _MIXTRAL),
    Published("mixtral-8x22b", "active", 39e9, _MIXTRAL),
    Published("deepseek-moe-16b", "parameters", 16.4e9, "Dai et al. 2024, DeepSeekMoE, table 3"),
    Published("deepseek-moe-16b", "active", 2.8e9, "Dai et al. 2024, DeepSeekMoE, table 3", 0.02),
    Published(
        "deepseek-v2-lite", "parameters", 15.7e9, "DeepSeek-AI 2024, DeepSeek-V2, appendix B"
    ),
    Published("deepseek-v2", "parameters", 236e9, "DeepSeek-AI 2024, DeepSeek-V2"),
    Published("deepseek-v2", "active", 21e9, "DeepSeek-AI 2024, DeepSeek-V2", 0.02),
    Published("deepseek-v3", "parameters", 671e9, "DeepSeek-AI 2024, DeepSeek-V3"),
    Published("deepseek-v3", "active", 37e9, "DeepSeek-AI 2024, DeepSeek-V3", 0.02),
    Published("gemma-4-31b", "parameters", 30.7e9, _CARD),
    Published("gemma-4-26b-a4b", "parameters", 25.2e9, _CARD),
    Published("gemma-4-26b-a4b", "active", 3.8e9, _CARD, 0.02),
    Published("llama3.2-1b", "parameters", 1.23e9, _CARD),
    Published("llama3.2-3b", "parameters", 3.21e9, _CARD),
    Published("llama4-scout", "active", 17e9, _CARD, 0.02),
    Published("llama4-maverick", "parameters", 400e9, _CARD),
    Published("llama4-maverick", "active", 17e9, _CARD, 0.02),
    Published("qwen2.5-7b", "parameters", 7.61e9, _CARD),
    Published("qwen2.5-32b", "parameters", 32.5e9, _CARD),
    Published("qwen2.5-72b", "parameters", 72.7e9, _CARD),
    Published("qwen3-0.6b", "parameters", 0.6e9, _QWEN3),
    Published("qwen3-1.7b", "parameters", 1.7e9, _QWEN3, 0.02),
    Published("qwen3-4b", "parameters", 4.0e9, _QWEN3),
    Published("qwen3-8b", "parameters", 8.2e9, _QWEN3),
    Published("qwen3-14b", "parameters", 14.8e9, _QWEN3),
    Published("qwen3-32b", "parameters", 32.8e9, _QWEN3),
    Published("qwen3-30b-a3b", "parameters", 30.5e9, _QWEN3),
    Published("qwen3-30b-a3b", "active", 3.3e9, _QWEN3, 0.02),
    Published("qwen3-235b-a22b", "parameters", 235e9, _QWEN3),
    Published("qwen3-235b-a22b", "active", 22e9, _QWEN3),
    Published("qwen3-coder-480b-a35b", "parameters", 480e9, _CARD),
    Published("qwen3-coder-480b-a35b", "active", 35e9, _CARD, 0.02),
    Published("gpt-oss-20b", "parameters", 20.91e9, _OPENAI),
    Published("gpt-oss-120b", "parameters", 116.83e9, _OPENAI),
    Published("gemma-2-9b", "parameters", 9.241e9, _GEMMA2),
    Published("gemma-2-27b", "parameters", 27.227e9, _GEMMA2),
    Published("gemma-3-4b", "parameters", 3.884e9, _GEMMA3),
    Published("gemma-3-12b", "parameters", 11.771e9, _GEMMA3),
    Published("gemma-3-27b", "parameters", 27.016e9, _GEMMA3),
    Published("mistral-nemo-12b", "parameters", 12.2e9, _HUB),
    Published("mistral-small-24b", "parameters", 23.6e9, _HUB),
    Published("phi-4", "parameters", 14.7e9, _HUB),
    Published("olmo-2-7b", "parameters", 7.3e9, _HUB),
    Published("olmo-2-13b", "parameters", 13.7e9, _HUB),
    Published("olmo-2-32b", "parameters", 32.2e9, _HUB),
    Published("smollm3-3b", "parameters", 3.08e9, _HUB),
    Published("nemotron-4-340b", "parameters", 341e9, "NVIDIA 2024, Nemotron-4 340B, section 2"),
    Published("kimi-k2", "parameters", 1e12, _CARD, 0.03),
    Published("kimi-k2", "active", 32.6e9, "Kimi team 2025, Kimi K2, table 2"),
    Published("glm-4.5", "parameters", 355e9, "GLM team 2025, GLM-4.5, table 1"),
    Published("glm-4.5-air", "parameters", 106e9, "GLM team 2025, GLM-4.5, table 1"),
    Published("minimax-m2", "parameters", 230e9, _CARD),
    Published("bert-base", "parameters", 110e6, "Devlin et al. 2019, BERT, section 3"),
    Published("bert-base,seq=128", "flops", 22.5e9, "Sun et al. 2020, MobileBERT, table 4"),
    Published("bert-large", "parameters", 335e6, "Clark et al. 2020, ELECTRA, table 2"),
    Published("modernbert-base", "parameters", 149e6, _MODERN),
    Published("modernbert-large", "parameters", 395e6, _MODERN),
    Published("t5-small", "parameters", 60.5e6, _CARD),
    Published("t5-base", "parameters", 223e6, _CARD),
    Published("t5-11b", "parameters", 11.3e9, _CARD),
    Published("whisper-small", "parameters", 244e6, "openai/whisper, README"),
    Published("whisper-large-v3", "parameters", 1550e6, "openai/whisper, README"),
    Published("vit-b16", "parameters", 86_567_656, _VISION),
    Published("vit-b16", "flops", 2 * 17.56e9, _VISION),
    Published("vit-l16", "parameters", 304_326_632, _VISION),
    Published("vit-l16", "flops", 2 * 61.55e9, _VISION),
    Published("vit-h14", "parameters", 632_045_800, _VISION),
    Published("vit-h14", "flops", 2 * 167.29e9, _VISION),
    Published("resnet18", "parameters", 11_689_512, _VISION),
    Published("resnet18", "flops", 2 * 1.81e9, _VISION),
    Published("resnet50", "parameters", 25_557_032, _VISION),
    Published("resnet50", "flops", 2 * 4.09e9, _VISION),
    Published("resnet101", "parameters", 44_549_160, _VISION),
    Published("resnet101", "flops", 2 * 7.80e9, _VISION),
    Published("resnet152", "parameters", 60_192_808, _VISION),
    Published("resnet152", "flops", 2 * 11.51e9, _VISION),
    Published("dit-s-2", "parameters", 33e6, _DIT),
    Published("dit-s-2", "flops", 2 * 6.06e9, _DIT),
    Published("dit-b-2", "parameters", 130e6, _DIT),
    Published("dit-b-2", "flops", 2 * 23.01e9, _DIT),
    Published("dit-l-2", "parameters", 458e6, _DIT),
    Published("dit-l-2", "flops", 2 * 80.71e9, _DIT),
    Published("dit-xl-2", "parameters", 675e6, _DIT),
    Published("dit-xl-2", "flops", 2 * 118.64e9, _DIT),
    Published("unet-sd15", "parameters", 860e6, "CompVis/stable-diffusion, README"),
    Published("mamba2-130m", "parameters", 129e6, _CARD),
    Published("mamba2-2.7b", "parameters", 2.7e9, _CARD),
)
