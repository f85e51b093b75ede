"""The zoo's models of a config.json compute what transformers' own do, from the same checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from models_zoo.hf_config import from_config
from planner.cli import main
from tests.interop.test_pretrained import load, save

from .hf_golden import CONFIGS, FILE, TOKENS, drawn, ids, some
from .test_run import first

GOLDEN = json.loads(FILE.read_text())


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    golden, source = GOLDEN[name], tmp_path / "hub"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIGS[name]))
    tensors = {k: drawn(k, tuple(shape)) for k, shape in golden["shapes"].items()}
    save(source / "model.safetensors", tensors)
    spec = f"{source / 'config.json'},seq={TOKENS}"
    args = ["weights", spec, "--from", str(source), "-o", str(tmp_path / "w.safetensors")]
    assert main(args) == 0
    values = load(tmp_path / "w.safetensors")
    options = {"weights": "inline", "seq": str(TOKENS)}
    model = from_config(source / "config.json", options)
    for tensor in model.graph.initializer:
        if tensor.name in values:
            tensor.raw_data = values.pop(tensor.name).astype("<f4").tobytes()
    assert not values
    logits = first(model, {"input_ids": ids(CONFIGS[name]["vocab_size"])})
    np.testing.assert_allclose(some(logits).ravel(), golden["logits"], rtol=2e-4, atol=2e-4)
