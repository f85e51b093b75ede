"""`plan weights`: a Hugging Face checkpoint as a program's --weights file, and a trained file as
the checkpoint again."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from planner.errors import PlanError
from planner.support import console

if TYPE_CHECKING:
    from planner.graph.ir import Graph
    from planner.interop.checkpoints.match import Matching
    from planner.interop.checkpoints.store import Shards
    from planner.workload.model import Model

_OFFSET, _PAIRS = "its positions begin at row 2 of their table", "its rotary pairs lie side by side"
_ONE_MORE = "its norms multiply by 1 + weight"
WRITTEN_OTHERWISE = {
    "camembert": _OFFSET,
    "cohere": _PAIRS,
    "cohere2": _PAIRS,
    "deepseek_v2": _PAIRS,
    "deepseek_v3": _PAIRS,
    "deepseek_v32": _PAIRS,
    "ernie4_5": _PAIRS,
    "ernie4_5_moe": _PAIRS,
    "gemma": _ONE_MORE,
    "gemma2": _ONE_MORE,
    "gemma3_text": _ONE_MORE,
    "glm": _PAIRS,
    "glm4": _PAIRS,
    "glm4_moe_lite": _PAIRS,
    "glm_moe_dsa": _PAIRS,
    "gptj": _PAIRS,
    "gpt_oss": "its softmax has a sink for each head",
    "internlm2": "the queries, keys and values of a group of heads lie side by side in one tensor",
    "kimi_k2": _PAIRS,
    "mistral4": _PAIRS,
    "llama4_text": f"{_PAIRS}, and its routers weigh what experts take in",
    "nemotron": _ONE_MORE,
    "qwen3_5_moe_text": _ONE_MORE,
    "qwen3_5_text": _ONE_MORE,
    "qwen3_next": _ONE_MORE,
    "roberta": _OFFSET,
    "youtu": _PAIRS,
    "xlm-roberta": _OFFSET,
}
"""model_type -> in what the library's arithmetic is not the zoo's, which is written for sizes: the
same weights would compute something else."""
_NUMBER = re.compile(r"(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])")


def run(args: argparse.Namespace) -> int:
    """Without -o, what would be read; with it the file, or with --back the folder."""
    from planner.interop.checkpoints import convert, match, store

    if args.back and not args.output:
        raise PlanError(
            "P003",
            "--back writes a folder: -o names it",
            help=["plan weights MODEL --from DIR --back trained.safetensors -o DIR2"],
        )
    shards = store.open_folder(args.source)
    target = Path(args.output) if args.output else None
    if target is not None and not args.back and target.exists() and not args.force:
        raise PlanError("P053", f"{target} exists", help=["-o another file, or --force"])
    model = opened(args)
    _refuse_other_arithmetic(model, shards)
    graph, folder = model.plain, model.folder
    matching = match.match(graph, shards, _buffers(graph, folder))
    if target is None:
        console.data(report(shards, matching))
    convert.refuse(graph, shards, matching, args.partial)
    if target is None:
        return 0
    if args.back:
        trained = Path(args.back)
        done = convert.back(graph, shards, matching, trained, target)
        console.say(
            f"wrote {target}: {_files(shards)}, {done.written} tensors with the values of"
            f" {trained},"
            f" {done.unchanged} as they were"
        )
        _name("no tensor of the checkpoint, left out", done.unmatched)
        return 0
    size = convert.to_program(graph, folder, shards, matching, target)
    console.say(report(shards, matching))
    console.say(f"wrote {target}, {size:,} bytes   next: python PROGRAM.py --weights {target}")
    return 0


def opened(args: argparse.Namespace) -> Model:
    """The model; what it leaves out of the original is said."""
    import planner.api as api
    from planner.commands.common import workload

    model: Model = api.open_model(args.model, 1, **workload(args))
    for note in (p.value for p in model.proto.metadata_props if p.key == "notes"):
        console.say(f"note: {note}")
    return model


def _refuse_other_arithmetic(model: Model, shards: Shards) -> None:
    """Raises PlanError P213 where a zoo model would not compute what the checkpoint was trained
    for."""
    from models_zoo.hf_config import text_kind

    kind = text_kind(shards.kind)
    if model.proto.producer_name == "meshwright-zoo" and kind in WRITTEN_OTHERWISE:
        raise PlanError(
            "P213",
            f"the zoo writes {kind} for its sizes, not for its weights: {WRITTEN_OTHERWISE[kind]}",
            help=["export the model: examples/export_hf.py (docs/exporting.md)"],
        )


def _buffers(graph: Graph, folder: Path | None) -> frozenset[str]:
    """Weights that do not train and have their bytes in the model: no checkpoint need have them."""
    from planner.workload.weights import missing

    away = set(missing(graph, folder))
    return frozenset(
        n for n in graph.weights if n not in graph.trainable and graph.labels[n] not in away
    )


def report(shards: Shards, matching: Matching) -> str:
    """How many parameters come from where, and what is left on either side."""
    takes = [(m, t) for m in matching.matches for t in m.takes]
    parts = sum(
        t.size != (s.shape[t.axis] if (s := shards.tensors[t.source]).shape else 1)
        for _, t in takes
    )
    ways = {
        "turned": sum(any(t.flip for t in m.takes) for m in matching.matches),
        "stacked": sum(m.stacked for m in matching.matches),
        "parts of fused ones": parts,
        "padded": sum(m.rows > 0 for m in matching.matches),
    }
    ways_text = ", ".join(f"{n} {what}" for what, n in ways.items() if n) or "all as they lie"
    parameters = len(matching.matches) + len(matching.missing) + len(matching.misfits)
    rows = [
        f"{len(matching.matches)} of {parameters} parameters from"
        f" {len({t.source for _, t in takes})} of {len(shards.tensors)} tensors in"
        f" {_files(shards)}: {ways_text}"
    ]
    rows += [f"  tied: {copy} = {source}" for copy, source in matching.tied.items()]
    readers: dict[tuple[str, int], list[str]] = {}
    for m, t in takes:
        readers.setdefault((t.source, t.start), []).append(m.label)
    rows += [
        f"  tied: {' and '.join(sorted(labels))} are read from one tensor, {source}"
        for (source, _), labels in readers.items()
        if len(labels) > 1
    ]
    rows += [
        f"  padded: {m.label} from {m.rows} to {m.shape[m.axis]} rows, zeros"
        for m in matching.matches
        if m.rows
    ]
    rows += [f"  not in the checkpoint: {row}" for row in grouped(matching.missing)]
    rows += [f"  not in the model: {row}" for row in grouped(matching.unread)]
    return "\n".join(rows)


def _files(shards: Shards) -> str:
    return f"{len(shards.files)} file{'s' if len(shards.files) > 1 else ''}"


def grouped(names: Iterable[str]) -> list[str]:
    """Names that differ in numbers alone as one: h.*.attn.bias x12."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_NUMBER.sub("*", name), []).append(name)
    return [
        f"{pattern} x{len(members)}" if len(members) > 1 else members[0]
        for pattern, members in groups.items()
    ]


def _name(what: str, names: Iterable[str]) -> None:
    for row in grouped(names):
        console.say(f"  {what}: {row}")
