"""The zoo's models of a config.json compute what transformers' own do, from the same checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from models_zoo.hf_config import from_config
from planner.cli import main
from planner.commands.weights import WRITTEN_OTHERWISE
from tests.interop.test_pretrained import load, save

from .hf_by_hand import BY_HAND
from .hf_golden import ALL, FILE, TOKENS, drawn, ids, some, sound
from .test_run import first

GOLDEN = json.loads(FILE.read_text())


@pytest.mark.parametrize("name", ALL)
def test_logits_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    golden, source, config = GOLDEN[name], tmp_path / "hub", ALL[name]
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    tensors = {k: drawn(k, tuple(shape)) for k, shape in golden["shapes"].items()}
    save(source / "model.safetensors", tensors)
    spec = f"{source / 'config.json'},seq={TOKENS}"
    args = ["weights", spec, "--from", str(source), "-o", str(tmp_path / "w.safetensors")]
    refused = config["model_type"] in WRITTEN_OTHERWISE
    assert main(args) == (2 if refused else 0)
    by_hand = BY_HAND.get(config["model_type"])
    assert (by_hand is not None) == refused
    values = by_hand(tensors, config) if by_hand else load(tmp_path / "w.safetensors")
    options = {"weights": "inline", "seq": str(TOKENS)}
    model = from_config(source / "config.json", options)
    for tensor in model.graph.initializer:
        if tensor.name in values:
            assert values[tensor.name].size == np.prod(tensor.dims), tensor.name
            tensor.raw_data = values.pop(tensor.name).astype("<f4").tobytes()
    assert not values
    tokens = ids(config["vocab_size"])
    feeds = {"attention_mask": np.ones_like(tokens), "input_ids": tokens}
    if "num_mel_bins" in config:
        feeds = {"input_features": sound(config), "decoder_input_ids": tokens}
    names = {value.name for value in model.graph.input}
    logits = first(model, {k: v for k, v in feeds.items() if k in names})
    np.testing.assert_allclose(some(logits).ravel(), golden["logits"], rtol=2e-4, atol=2e-4)
