"""Presets by the names that people know their models by."""

from __future__ import annotations

import pytest

import models_zoo
from models_zoo.hub_names import KNOWN_AS, preset_meant
from planner.errors import PlanError

NAMES = {
    "meta-llama/Meta-Llama-3-8B": "llama3-8b",
    "meta-llama/Meta-Llama-3-8B-Instruct": "llama3-8b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama3.1-8b",
    "NousResearch/Meta-Llama-3.1-8B": "llama3.1-8b",
    "meta-llama/Llama-2-7b-chat-hf": "llama2-7b",
    "meta-llama/Llama-3.2-1B": "llama3.2-1b",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "llama4-scout",
    "mistralai/Mistral-7B-v0.1": "mistral-7b",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mixtral-8x7b",
    "mistralai/Mistral-Nemo-Instruct-2407": "mistral-nemo-12b",
    "mistralai/Mistral-Small-24B-Instruct-2501": "mistral-small-24b",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "qwen3-30b-a3b",
    "Qwen/Qwen3-8B-Base": "qwen3-8b",
    "google/gemma-2-9b-it": "gemma-2-9b",
    "google/gemma-3-27b-pt": "gemma-3-27b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "openai-community/gpt2": "gpt2-small",
    "openai-community/gpt2-xl": "gpt2-xl",
    "deepseek-ai/DeepSeek-V3-0324": "deepseek-v3",
    "deepseek-ai/DeepSeek-V2-Lite-Chat": "deepseek-v2-lite",
    "moonshotai/Kimi-K2-Instruct-0905": "kimi-k2",
    "zai-org/GLM-4.5-Air-FP8": "glm-4.5-air",
    "google-bert/bert-base-uncased": "bert-base",
    "google-t5/t5-base": "t5-base",
    "allenai/OLMo-2-1124-7B": "olmo-2-7b",
    "microsoft/phi-4": "phi-4",
    "llama_3_70b": "llama3-70b",
    "LLAMA3-8B": "llama3-8b",
    # of other shapes than any preset
    "mistralai/Mistral-7B-v0.3": "",
    "google-bert/bert-base-cased": "",
    "meta-llama/Llama-3-9B": "",
    "microsoft/phi-4-mini-instruct": "",
    "Qwen/Qwen25-7B": "",
    "base": "",
    "": "",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_the_hub_means_the_preset_of_its_shapes(name: str) -> None:
    assert models_zoo.preset_named(name) == NAMES[name]


def test_every_name_that_is_told_names_a_preset() -> None:
    presets = models_zoo.presets()
    assert set(KNOWN_AS.values()) <= presets.keys()
    assert all(models_zoo.preset_named(preset) == preset for preset in presets)


def test_a_name_that_two_presets_are_spelled_like_means_neither() -> None:
    assert preset_meant("Some-Model", ["some-model", "somemodel"]) == ""


def test_a_spec_may_spell_its_preset_so() -> None:
    assert models_zoo.parse("zoo:meta-llama/Llama-3.1-8B,layers=2")[1:] == (
        "llama3-8b",
        {"layers": 2},
    )
    with pytest.raises(PlanError, match="`python -m models_zoo` lists"):
        models_zoo.parse("zoo:nothing-like-it")
