"""Options that several commands have: model, workload, machine, search, cache, serving."""

from __future__ import annotations

import argparse

from costmodels.optimizers import OPTIMIZERS
from planner.commands.options.values import lengths, pair, positive, seconds, whole, whole_or_fewest


def saved(p: argparse.ArgumentParser) -> None:
    """A saved strategy and its model."""
    p.add_argument("strategy", metavar="STRATEGY.json", help="a saved plan")
    p.add_argument(
        "--model", metavar="FILE", help="the model (default: where the strategy found it)"
    )


def add_model(p: argparse.ArgumentParser, many: bool = False) -> None:
    """Options of what is planned. many: at several sizes."""
    p.add_argument(
        "model",
        metavar="FILE",
        help="an ONNX file, zoo:NAME[,key=value...], or a Hugging Face config.json",
    )
    add_workload(p, many)


def add_workload(p: argparse.ArgumentParser, many: bool = False) -> None:
    """Options of what is run. many: at several sizes."""
    g = p.add_argument_group("workload")
    _add_sizes(g, many)
    _add_input_shapes(g, many)
    _add_loss(g)
    _add_trained_parameters(g)
    _add_routing(g)
    _add_optimizer(g)


def _add_sizes(g: argparse._ArgumentGroup, many: bool) -> None:
    """The kind of the workload, its batch and its other dimensions. many: lists of them."""
    g.add_argument(
        "--workload",
        metavar="KIND",
        default="train",
        help="train (default: forward, backward, gradient sync, optimizer) or infer",
    )
    if many:
        g.add_argument(
            "--batch",
            metavar="LIST",
            help=(
                "global batches, 64,256..1024 (the dots double), or max: the largest that fits"
                " without accumulation"
            ),
        )
        g.add_argument(
            "--dim",
            type=pair,
            action="append",
            default=[],
            metavar="NAME=LIST",
            help="sizes of a dimension, 4k,8k..128k; of zoo models any option",
        )
        g.add_argument(
            "--scaling",
            metavar="KIND",
            help=(
                "over the devices: strong (the first one's batch stays) or weak (it grows with"
                " them)"
            ),
        )
    else:
        g.add_argument(
            "--batch",
            type=whole,
            metavar="N",
            help=(
                "global batch per optimizer step (default: the exported one, or the next multiple"
                " of the devices)"
            ),
        )
        g.add_argument(
            "--dim",
            type=pair,
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help="any other symbolic dimension",
        )


def _add_input_shapes(g: argparse._ArgumentGroup, many: bool) -> None:
    """What else settles the shapes of the inputs. many: at several sizes."""
    g.add_argument(
        "--tokens-per-step",
        type=whole,
        metavar="N",
        help="the batch in tokens" + (", held while dimensions change" if many else ""),
    )
    g.add_argument(
        "--shape",
        type=pair,
        action="append",
        default=[],
        metavar="INPUT=4,8",
        help="shape of an input that has none",
    )


def _add_loss(g: argparse._ArgumentGroup) -> None:
    """What the loss is and what it reads."""
    g.add_argument(
        "--loss",
        default="",
        metavar="LOSS",
        help=(
            "cross_entropy, mse, l1, bce, output:NAME, output:a+0.5*output:b or FILE.py:function"
            " (default: from the model's output)"
        ),
    )
    g.add_argument(
        "--logits",
        default="",
        metavar="NAME",
        help="the output that the loss reads (default: the first)",
    )
    g.add_argument(
        "--shift-labels",
        action="store_true",
        help="labels are the tokens: each position is held against the next one's",
    )
    g.add_argument(
        "--ignore-index",
        type=int,
        metavar="N",
        help="label of positions that do not count in cross_entropy, such as -100",
    )


def _add_routing(g: argparse._ArgumentGroup) -> None:
    """Options of what is known of the routers of experts, and what experts take."""
    g.add_argument(
        "--imbalance",
        metavar="SPREAD",
        help=(
            "how routers spread tokens over experts: rows of the busiest device over the mean, or"
            " a file of a router's counts, one for each expert (default: 1.25, a guess)"
        ),
    )
    g.add_argument(
        "--capacity",
        metavar="FACTOR",
        help=(
            "an expert takes so many times the mean of a sample's tokens and drops the others,"
            " which count as not done (default: none is dropped)"
        ),
    )


def _add_trained_parameters(g: argparse._ArgumentGroup) -> None:
    """Which parameters are trained, and where large embedding tables are."""
    g.add_argument(
        "--trainable",
        action="append",
        default=[],
        metavar="GLOB",
        help="parameters to train and no others; +GLOB adds to those in trainable places",
    )
    g.add_argument(
        "--freeze",
        action="append",
        default=[],
        metavar="GLOB",
        help="parameters to keep: no gradient, no optimizer state, no reduction",
    )
    g.add_argument(
        "--tie",
        action="append",
        default=[],
        metavar="A=B",
        help="two parameters are one, such as an embedding and a head that the export parted",
    )
    g.add_argument(
        "--lora",
        default="",
        metavar="SPEC",
        help="train adapters alone: rank=16[,targets=q_proj,v_proj][,alpha=32] (default: of all"
        " linear layers but the head)",
    )
    g.add_argument(
        "--tables",
        default="device",
        metavar="WHERE",
        help=(
            "large embedding tables: device (default), or host or server: rows pulled for a step"
            " (docs/tables.md)"
        ),
    )


def _add_optimizer(g: argparse._ArgumentGroup) -> None:
    """The optimizer, its learning rate and the precision."""
    first, *others, last = OPTIMIZERS
    names = ", ".join([f"{first} (default)", *others])
    g.add_argument("--optimizer", default=first, metavar="NAME", help=f"{names} or {last}")
    g.add_argument(
        "--lr",
        type=positive,
        default=1e-4,
        metavar="RATE",
        help="learning rate of the emitted program (default 1e-4)",
    )
    g.add_argument(
        "--precision",
        default="bf16-mixed",
        metavar="RECIPE",
        help="bf16-mixed (default), fp32, bf16-pure, fp16, fp8, int8-weights; of"
        " Megatron, priced: bf16-fp32-grads, fp8-fp32-grads",
    )


def add_machine(p: argparse.ArgumentParser, many: bool = False, serving: bool = False) -> None:
    """Options of what a plan runs on. serving: the fewest devices may be asked for."""
    g = p.add_argument_group("machine")
    if many:
        g.add_argument(
            "--devices",
            metavar="LIST",
            help="counts: 8,16..512 (the dots double), or fewest: as few as fit",
        )
        g.add_argument(
            "--hardware",
            metavar="NAME,...",
            help=(
                "devices, machines, TPU slices (v5e:4x8) or files, rows of each (default h100-sxm)"
            ),
        )
    else:
        fewest = ", or fewest: as few as serve a --rate" if serving else ""
        g.add_argument(
            "--devices",
            type=whole_or_fewest if serving else whole,
            metavar="N",
            help=f"number of devices{fewest}",
        )
        g.add_argument(
            "--hardware",
            metavar="NAME|FILE",
            help=(
                "a shipped device, a TPU slice such as v5e:4x8, or a file (default h100-sxm; `plan"
                " hardware` lists them)"
            ),
        )
        g.add_argument(
            "--topology",
            metavar="NAME|FILE",
            help="device and link levels instead, or a shipped machine",
        )
    g.add_argument(
        "--memory-limit", metavar="SIZE", help="bytes a plan may use on a device, such as 80GiB"
    )
    g.add_argument(
        "--memory-reserve",
        metavar="SIZE",
        help=(
            "bytes of a device to keep free (default 2 GiB); emitted programs preallocate the rest"
            " on GPUs"
        ),
    )
    g.add_argument(
        "--runtime",
        default="jax-shard_map",
        metavar="NAME",
        help="whose program is priced: jax-shard_map (default), jax-jit, megatron, fsdp",
    )


def add_search(p: argparse.ArgumentParser, solver: bool = True) -> argparse._ArgumentGroup:
    """Options of how a plan is searched; their group, for more options."""
    g = p.add_argument_group("search")
    g.add_argument(
        "--mode",
        default="auto",
        metavar="MODE",
        help=(
            "who decides: auto (default), data-parallel; with --pin: semi-auto, hybrid, propagate"
            " (docs/modes.md), manual (a strategy.json)"
        ),
    )
    g.add_argument(
        "--for",
        dest="launcher",
        metavar="LAUNCHER",
        default="",
        help=(
            "plans that a launcher's own settings can say, priced as it runs them: megatron,"
            " maxtext, torchtitan, hf, levanter (docs/tuning.md); of serving plans vllm, sglang"
        ),
    )
    if solver:
        g.add_argument(
            "--solver", default="auto", metavar="NAME", help="auto (default), dp, recursive, ilp"
        )
    g.add_argument(
        "--pin",
        action="append",
        metavar="FILE|LIST",
        help=(
            "decisions to respect, together where given several times: a TOML file, `annotated`"
            " (those in the ONNX), or a list such as"
            " tp=4,pp=2,vpp=2,micro=16 of: tp, dp, ddp, fsdp (ZeRO-3 over so many), pp stages, vpp"
            " virtual stages (interleaved), cp (context), ep (experts), sp=on (Megatron's, with"
            " tp), zero=0..3, micro, recompute=none|selective|full|save:NAMES,"
            " schedule, offload=optimizer+parameters, bucket=25MB, copies=2,"
            " blocks=looped|written-out (docs/modes.md)"
        ),
    )
    g.add_argument(
        "--objective",
        default="step",
        metavar="WHAT",
        help="step (time, default) or memory; of serving: throughput (default), ttft or tpot",
    )
    g.add_argument(
        "--time-limit", type=seconds, metavar="S", help="seconds; the best plan so far is returned"
    )
    g.add_argument("--seed", type=int, default=0, metavar="N")
    g.add_argument("--strict", action="store_true", help="fail on an operator without a rule")
    add_cache(g)
    return g


def add_cache(p: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Where searches are kept."""
    p.add_argument(
        "--cache",
        metavar="DIR",
        help=(
            "where searches are kept and recalled from (default: MESHWRIGHT_CACHE, or"
            " ~/.cache/meshwright): --cache build/plans"
        ),
    )
    p.add_argument(
        "--no-cache", action="store_true", help="search and price anew, and keep nothing"
    )


def add_serving(p: argparse.ArgumentParser) -> None:
    """Options of what is served, with --workload infer."""
    g = p.add_argument_group(
        "serving",
        "a decoder exported with a cache: --workload infer --prompt 2048 --generate 256"
        " --concurrency 64 (docs/serving.md)",
    )
    g.add_argument(
        "--prompt",
        type=lengths,
        metavar="N",
        help=(
            "tokens of a prompt; with --rate also 512..2048 (evenly) or 512~2048 (half up to the"
            " first, one in a hundred over the second)"
        ),
    )
    g.add_argument(
        "--generate", type=lengths, metavar="N", help="tokens generated for each, likewise"
    )
    g.add_argument("--concurrency", type=whole, metavar="N", help="sequences at once")
    _add_arrivals(g)
    g.add_argument(
        "--prefill-tokens",
        type=whole,
        metavar="N",
        help=(
            "tokens of prompts that a replica passes at once (default 8k; at least one prompt);"
            " with --rate tokens of a step (default: 512, 2k or 8k)"
        ),
    )
    g.add_argument(
        "--cache-type",
        default="compute",
        metavar="TYPE",
        help="keys and values are kept in: compute (default: the type computed in) or fp8",
    )
    g.add_argument(
        "--draft",
        metavar="MODEL|SHARE",
        help=(
            "speculative decoding: from which acceptance on drafts of a model pay, or of one whose"
            " step takes such a share of the model's, 0.05"
        ),
    )
    g.add_argument(
        "--quantize",
        default="none",
        metavar="NAME",
        help="none (default), or int8: weights of products, a scale for each column",
    )


def _add_arrivals(g: argparse._ArgumentGroup) -> None:
    """Requests that arrive, and how long they may wait."""
    g.add_argument(
        "--rate",
        metavar="R",
        help=(
            "requests a second, or the file of a trace: requests join while others generate, and"
            " --concurrency, the most at once, may be left out"
        ),
    )
    for name, what in (("ttft", "the first token"), ("tpot", "a token after that")):
        g.add_argument(
            f"--{name}",
            metavar="TIME",
            help=(
                f"with --rate: 99 requests in a hundred wait for {what} at most so long, 500ms; or"
                " p90=500ms"
            ),
        )
    g.add_argument(
        "--pools",
        action="store_true",
        help="with --rate: also try prompts and generation on devices apart",
    )


def add_anchor(p: argparse.ArgumentParser) -> None:
    """A measured step that prices are scaled to."""
    p.add_argument(
        "--calibrate-with",
        metavar="PLAN=STEP",
        default="",
        help=(
            "scale prices to a measured step of a plan on such devices: node.plan.json=1.43s, or"
            " =log.jsonl of its program (docs/calibrate.md)"
        ),
    )
