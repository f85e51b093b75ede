"""Export a Hugging Face model of any size to ONNX without its weights, from its config.json alone.

    python examples/export_hf.py path/to/config.json -o model.onnx --seq 4096
    plan model.onnx --devices 64

Needs torch, transformers and onnxscript (not needed by the planner). Nothing is downloaded when the
config is a local file or folder, and no weight is ever made: parameters are memory that nobody
touches, because every initialiser is switched off, so 70 G parameters take well under a gigabyte.
The file refers to `weights.bin` beside it, which does not exist: what a user has who was sent only
model.onnx. Planning never opens it.

--cache writes a decoder in the form that serving needs: earlier keys and values are inputs, batch
and lengths are free (docs/serving.md).

docs/exporting.md says what to watch for.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WEIGHTS_FILE = "weights.bin"
SCOPES = "pkg.torch.onnx.name_scopes"
"""The one entry of a node's metadata that planning uses (module paths); the others are most of an
exported file."""
LARGEST_FOLDED = 1024
"""Elements of a constant that folding may write; larger ones stay as the few nodes that make
them."""


@contextlib.contextmanager
def without_initialisation() -> Iterator[None]:
    """Inside, parameters are allocated and never written: transformers' own switch, and
    torch.nn.init as no-ops for what it misses."""
    import torch
    import transformers

    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # transformers 4
        no_init_weights = transformers.modeling_utils.no_init_weights
    functions = [n for n in dir(torch.nn.init) if n.endswith("_") and not n.startswith("_")]
    kept = {n: getattr(torch.nn.init, n) for n in functions}
    try:
        for n in functions:
            setattr(torch.nn.init, n, lambda tensor, *args, **kwargs: tensor)
        with no_init_weights():
            yield
    finally:
        for n, function in kept.items():
            setattr(torch.nn.init, n, function)


def make_model(config: Any) -> Any:
    """The model class that the config names, or a causal language model."""
    import transformers

    names = [n for n in config.architectures or () if hasattr(transformers, n)]
    # of the ways to run experts, the one that torch's exporter can write
    config._experts_implementation = "batched_mm"
    with without_initialisation():
        model = (
            getattr(transformers, names[0])._from_config(config)
            if names
            else transformers.AutoModelForCausalLM.from_config(config)
        )
    model.tie_weights()  # a part of the initialisation that was switched off
    return model.eval()


def example_inputs(model: Any, batch: int, seq: int) -> dict[str, Any]:
    """Inputs of the wanted sizes, by name."""
    import torch

    ids = lambda: torch.zeros(batch, seq, dtype=torch.int64)  # noqa: E731
    if model.main_input_name == "pixel_values":
        size = model.config.image_size
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return {"pixel_values": torch.zeros(batch, model.config.num_channels, height, width)}
    return {"input_ids": ids()} | (
        {"decoder_input_ids": ids()} if model.config.is_encoder_decoder else {}
    )


def cache_inputs(model: Any, batch: int, seq: int) -> dict[str, Any]:
    """Inputs of a decoder with its cache, by name: ids, mask and positions, then keys and values of
    as many earlier tokens as there are new ones and one more."""
    import torch

    c, past = model.config, seq + 1
    heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    found = {
        "input_ids": torch.zeros(batch, seq, dtype=torch.int64),
        "attention_mask": torch.ones(batch, past + seq, dtype=torch.int64),
        "position_ids": torch.arange(past, past + seq).repeat(batch, 1),
    }
    return found | {
        f"past_key_values.{i}.{part}": torch.zeros(batch, heads, past, width)
        for i in range(c.num_hidden_layers)
        for part in ("key", "value")
    }


def cached(model: Any, names: list[str]) -> Any:
    """The model as a function of `cache_inputs`: logits, then keys and values of all tokens."""
    import torch
    from transformers import DynamicCache

    class Cached(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *inputs: Any) -> Any:
            given, past = dict(zip(names[:3], inputs[:3], strict=True)), DynamicCache()
            for i in range(0, len(inputs) - 3, 2):
                past.update(inputs[3 + i], inputs[4 + i], i // 2)
            made = self.model(**given, past_key_values=past, use_cache=True)
            return made.logits, *(
                part for layer in made.past_key_values.layers for part in (layer.keys, layer.values)
            )

    return Cached().eval()


def wrapped(model: Any, names: list[str]) -> Any:
    """The model as a function of positional inputs that returns its first output, without
    caches."""
    import torch

    class First(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *inputs: Any) -> Any:
            caches = {"use_cache": False} if "input_ids" in names else {}
            return self.model(**dict(zip(names, inputs, strict=True)), **caches, return_dict=True)[
                0
            ]

    return First().eval()


def export(model: Any, inputs: dict[str, Any], opset: int) -> Any:
    """The onnx_ir model of torch's exporter, its parameters still untouched memory.

    The exporter's own optimisation is off: it would compute with parameters (transposes, scales of
    norms) and merge those of equal value, and they have no values here. Constants among the rest
    are folded, and what was written twice becomes one.
    """
    import torch
    from onnx_ir.passes.common import CommonSubexpressionEliminationPass, RemoveUnusedNodesPass
    from onnxscript.optimizer import fold_constants

    names = list(inputs)
    past = [n for n in names if n.startswith("past_key_values")]
    free = torch.export.Dim.DYNAMIC
    shapes = (tuple({0: free, 2 if n in past else 1: free} for n in names),) if past else None
    with torch.no_grad():
        program = torch.onnx.export(
            (cached if past else wrapped)(model, names),
            tuple(inputs.values()),
            input_names=names,
            dynamic_shapes=shapes,
            output_names=["logits", *(n.replace("past_key_values", "present") for n in past)],
            dynamo=True,
            opset_version=opset,
            optimize=False,
            verbose=False,
        )
    made, parameters = program.model, parameter_names(model)
    keep = lambda node: (  # noqa: E731
        False if any(v is not None and v.name in parameters for v in node.inputs) else None
    )
    fold_constants(
        made, onnx_shape_inference=True, output_size_limit=LARGEST_FOLDED, should_fold=keep
    )
    CommonSubexpressionEliminationPass()(made)
    RemoveUnusedNodesPass()(made)
    return made


def parameter_names(model: Any) -> set[str]:
    """What the parameters are called in the exported file."""
    return {f"model.{n}" for n, _ in model.named_parameters(remove_duplicate=False)}


def drop_weights(exported: Any, model: Any) -> int:
    """Make every parameter a reference into the absent file, back to back; returns that file's
    length in bytes."""
    import onnx_ir as ir

    parameters, offset = parameter_names(model), 0
    for name, value in exported.graph.initializers.items():
        if name not in parameters:
            continue  # constants and buffers, such as rotary frequencies, keep their values
        t = value.const_value
        value.const_value = ir.ExternalTensor(
            WEIGHTS_FILE, offset, t.nbytes, t.dtype, shape=t.shape, name=name, base_dir=""
        )
        offset += t.nbytes
    for node in exported.graph.all_nodes():
        for key in [k for k in node.metadata_props if k != SCOPES]:
            del node.metadata_props[key]
    return offset


def write(exported: Any, path: Path) -> None:
    """The file, whole or not at all."""
    import onnx_ir as ir

    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(ir.serde.serialize_model(exported).SerializeToString())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    p = argparse.ArgumentParser(
        description="Export a Hugging Face model to ONNX without its weights.", allow_abbrev=False
    )
    p.add_argument("config", help="a config.json, a folder with one, or a name of the hub")
    p.add_argument("-o", dest="output", type=Path, required=True, metavar="FILE.onnx")
    p.add_argument(
        "--batch",
        type=int,
        default=8,
        help="batch of the exported graph (default 8); `plan --batch` changes it later",
    )
    p.add_argument("--seq", type=int, default=1024, help="tokens of a sequence (default 1024)")
    p.add_argument(
        "--cache",
        action="store_true",
        help=(
            "a decoder with its keys and values as inputs, for serving; --batch and --seq then only"
            " shape the example"
        ),
    )
    p.add_argument("--layers", type=int, help="num_hidden_layers instead of the config's")
    p.add_argument("--opset", type=int, default=20, help="default 20")
    p.add_argument("--force", action="store_true", help="overwrite the file")
    args = p.parse_args(argv)
    if args.output.exists() and not args.force:
        p.error(f"{args.output} exists: --force overwrites it")
    if not args.output.resolve().parent.is_dir():
        p.error(f"{args.output.parent} is no folder")
    from transformers import AutoConfig

    start = time.monotonic()
    config = AutoConfig.from_pretrained(args.config)
    if args.layers:
        config.num_hidden_layers = args.layers
    model = make_model(config)
    made = export(
        model,
        (cache_inputs if args.cache else example_inputs)(model, args.batch, args.seq),
        args.opset,
    )
    missing_bytes = drop_weights(made, model)
    write(made, args.output)
    count = sum(t.numel() for t in model.parameters())
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    print(
        f"wrote {args.output}: {count:,} parameters ({missing_bytes:,} bytes of weights left out),"
        f" {len(made.graph)} nodes, {time.monotonic() - start:.0f} s, {peak_bytes / 1e9:.2f} GB"
        " resident at most",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
