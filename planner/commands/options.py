"""The options of every command, and how their values are read. Imported for `plan --help`: argparse
and nothing else."""

from __future__ import annotations

import argparse

from costmodels.optimizers import OPTIMIZERS


def pair(text: str) -> tuple[str, str]:
    """NAME=VALUE."""
    name, eq, value = text.partition("=")
    if not eq or not name or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def whole(text: str) -> int:
    """A whole number of at least 1, with k and M for thousands of 1024: "4k"."""
    scale = {"k": 1024, "K": 1024, "M": 1024**2}.get(text[-1:], 1)
    digits = text[:-1] if scale > 1 else text
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 15 or int(digits) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(digits) * scale


def amount(text: str) -> float:
    """A number above 0 with K, M, B or T for powers of a thousand: "2T" tokens, "1.5M" dollars."""
    scale = {"K": 1e3, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:], 1.0)
    try:
        value = float(text[:-1] if scale > 1 else text) * scale
    except ValueError:
        value = 0.0
    if not 0 < value < 1e18:
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount above 0, such as 2T or 1.5M")
    return value


def duration(text: str) -> float:
    """Seconds of "30d", "12h" or "2w"."""
    scale = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}.get(text[-1:], 0)
    try:
        value = float(text[:-1]) * scale
    except ValueError:
        value = 0.0
    if not 0 < value < 1e12:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 30d, 12h or 2w")
    return value


def span(text: str) -> tuple[int, int]:
    """(least, most) of "2..8"; of "8" both are 8."""
    least, dots, most = text.partition("..")
    found = whole(least), whole(most if dots else least)
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"{text!r} runs backwards")
    return found


def whole_or_fewest(text: str) -> int | str:
    """A whole number, or the word."""
    return text if text == "fewest" else whole(text)


def lengths(text: str) -> int | str:
    """Tokens of a request: a number, or a distribution as written, "512..2048", "512~2048"."""
    mark = next((m for m in ("..", "~") if m in text), "")
    if not mark:
        return whole(text)
    return mark.join(str(whole(part)) for part in text.split(mark, 1))


def seconds(text: str) -> float:
    """Seconds above 0."""
    return positive(text.removesuffix("s"))


def positive(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e12:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def add_model(p: argparse.ArgumentParser, many: bool = False) -> None:
    """What is planned. many: at several sizes."""
    p.add_argument(
        "model",
        metavar="FILE",
        help="an ONNX file, zoo:NAME[,key=value...], or a Hugging Face config.json",
    )
    add_workload(p, many)


def add_workload(p: argparse.ArgumentParser, many: bool = False) -> None:
    """What is run. many: at several sizes."""
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
    """What is known of the routers of experts, and what experts take."""
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
        help="train adapters alone: rank=16,targets=GLOB[,alpha=32]",
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
    """What it runs on. serving: the fewest devices may be asked for."""
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
    """How it is searched; the group, for more options."""
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
            " maxtext, torchtitan, hf, levanter (docs/tuning.md)"
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
    """What is served, with --workload infer."""
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


def make(p: argparse.ArgumentParser) -> None:
    """Options of the main verb."""
    add_model(p)
    add_machine(p, serving=True)
    add_anchor(p)
    add_search(p).add_argument(
        "--incremental",
        action="store_true",
        help=(
            "keep what was decided for most of a model planned before (in the cache) and solve what"
            " changed; without it all is searched"
        ),
    )
    add_serving(p)
    p.add_argument(
        "--confirm",
        default="",
        metavar="WHERE",
        help=(
            "gpu:h100 or tpu:v5e:4x4: compile the best plans (three at most) without the hardware"
            " and take the first that the compiler says fits"
        ),
    )
    g = p.add_argument_group("output")
    g.add_argument(
        "-o", dest="output", metavar="FILE", help="strategy file (default: MODEL.plan.json)"
    )
    g.add_argument(
        "--emit", metavar="DIR|FILE.py", help="also write the program, as `plan emit -o` does"
    )
    g.add_argument(
        "--backend",
        default="shard_map",
        metavar="NAME",
        help="of --emit: shard_map (default) or jit",
    )
    g.add_argument("--json", action="store_true", help="the strategy on stdout, no summary")
    g.add_argument("--quiet", action="store_true", help="no summary and no progress")
    g.add_argument("--force", action="store_true", help="overwrite files of other models")


def saved(p: argparse.ArgumentParser) -> None:
    """A saved strategy and its model."""
    p.add_argument("strategy", metavar="STRATEGY.json", help="a saved plan")
    p.add_argument(
        "--model", metavar="FILE", help="the model (default: where the strategy found it)"
    )


def show(p: argparse.ArgumentParser) -> None:
    """Options of `plan show`."""
    saved(p)
    p.add_argument(
        "other", nargs="?", metavar="OTHER.json", help="with --html: a second plan beside the first"
    )
    p.add_argument("--json", action="store_true", help="the strategy as JSON")
    p.add_argument("--html", metavar="FILE.html", help="write one self-contained page")
    p.add_argument(
        "--trace",
        metavar="FILE.json",
        help="write one step as a Chrome trace for Perfetto (needs the model)",
    )
    p.add_argument(
        "--png",
        metavar="FILE.png",
        help="write timeline and memory as a picture (needs the model and matplotlib)",
    )


# Long: a call per option.
def explain(p: argparse.ArgumentParser) -> None:
    """Options of `plan explain`."""
    saved(p)
    p.add_argument(
        "node",
        nargs="?",
        metavar="NODE_OR_TENSOR",
        help=(
            "a node, tensor, parameter or part of its name (as the file has it; with --model priced"
            " anew)"
        ),
    )
    p.add_argument(
        "--price",
        action="store_true",
        help=(
            "formula, inputs and constants of NODE's price, with file, line and source of each"
            " (needs the model)"
        ),
    )
    p.add_argument(
        "--pins",
        action="store_true",
        help=(
            "what each pin that the plan was made under costs: a search without it each (needs the"
            " model)"
        ),
    )
    p.add_argument(
        "--untied",
        action="store_true",
        help=(
            "what is lost because repeated blocks decide alike: what each deciding for itself could"
            " save (needs the model)"
        ),
    )
    p.add_argument(
        "--minimal-pins",
        action="store_true",
        help=(
            "the fewest annotations that --mode propagate makes this plan of, as a file for --pin"
            " (needs the model)"
        ),
    )
    p.add_argument(
        "--without",
        metavar="NODES",
        help=(
            "what missing nodes cost: the plan made anew without node 3, or 3,5 (numbered from 0;"
            " needs the model)"
        ),
    )
    p.add_argument(
        "--slow",
        metavar="NODE=SHARE",
        help=(
            "what a node at a share of its speed costs, such as 3=0.8: all wait for it, or it is"
            " left out (needs the model)"
        ),
    )
    p.add_argument(
        "--json", action="store_true", help="with --without or --slow: the figures as JSON"
    )


def diff(p: argparse.ArgumentParser) -> None:
    """Options of `plan diff`."""
    p.add_argument("before", metavar="A.json")
    p.add_argument("after", metavar="B.json")


def check(p: argparse.ArgumentParser) -> None:
    """Options of `plan check`."""
    p.add_argument("model", metavar="FILE", help="the model as it is now")
    p.add_argument(
        "--against", required=True, metavar="STRATEGY.json", help="the committed baseline"
    )
    p.add_argument(
        "--tolerance",
        default="step=2%,memory=5%",
        metavar="LIST",
        help="largest growth allowed (default step=2%%,memory=5%%)",
    )
    p.add_argument(
        "--budget",
        metavar="FILE.toml",
        help="absolute limits per model: step_time, memory, devices",
    )
    p.add_argument(
        "--format",
        default="text",
        metavar="NAME",
        help="text (default), markdown, github, json, junit, badge",
    )
    p.add_argument(
        "--write",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="the same report in another format to a file: markdown=report.md; as often as wanted",
    )
    add_cache(p)


def emit(p: argparse.ArgumentParser) -> None:
    """Options of `plan emit`."""
    saved(p)
    p.add_argument(
        "--backend",
        default="shard_map",
        metavar="NAME",
        help="shard_map (default: explicit collectives) or jit",
    )
    p.add_argument(
        "--unroll",
        action="store_true",
        help="repeated blocks as a loop in Python instead of lax.scan (serving: always)",
    )
    p.add_argument(
        "-o",
        dest="output",
        metavar="DIR|FILE.py",
        help=(
            "a folder: model.py, which is yours to edit, beside the runtime; or FILE.py: all in one"
            " file (default: MODEL.py here; - for stdout)"
        ),
    )
    p.add_argument(
        "--standalone", action="store_true", help="one file, whatever the name after -o ends in"
    )
    p.add_argument(
        "--runtime-only",
        action="store_true",
        help="write the runtime of the folder after -o anew, and leave model.py alone",
    )
    p.add_argument(
        "--force",
        action="store_true",
        help="overwrite a file that this command did not write, or that was edited since",
    )


def annotate(p: argparse.ArgumentParser) -> None:
    """Options of `plan annotate`."""
    saved(p)
    p.add_argument(
        "-o", dest="output", metavar="FILE.onnx", help="default: MODEL.annotated.onnx here"
    )
    p.add_argument("--force", action="store_true", help="overwrite the file")


def export(p: argparse.ArgumentParser) -> None:
    """Options of `plan export`."""
    saved(p)
    p.add_argument(
        "--to",
        metavar="NAME",
        default="",
        help=(
            "maxtext, hf, levanter, megatron or torchtitan (default: the one that it was planned"
            " --for); of a serving plan vllm or sglang"
        ),
    )
    p.add_argument(
        "-o",
        dest="output",
        metavar="FILE",
        help=(
            "the settings (default: stdout, and their cost to stderr); the ending says the form"
            " (.sh, .args, .py, .toml, .yaml: docs/exchange.md)"
        ),
    )
    p.add_argument("--force", action="store_true", help="overwrite the file")


def _add_configuration(p: argparse.ArgumentParser) -> None:
    """A launcher's configuration and what it trains."""
    p.add_argument(
        "config",
        metavar="CONFIG",
        help=(
            "a configuration: a launch script or its arguments (.sh, .args), YAML, TOML, JSON, or"
            " Python (FILE.py:FUNCTION)"
        ),
    )
    p.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="other values of keys, or variables of the script",
    )
    p.add_argument(
        "--model",
        required=True,
        metavar="FILE",
        help="what it trains: an ONNX file, zoo:NAME[,key=value...], or a Hugging Face config.json",
    )
    p.add_argument(
        "--from",
        dest="kind",
        default="",
        metavar="NAME",
        help="megatron, maxtext, torchtitan, hf or levanter (default: by its keys)",
    )


def import_(p: argparse.ArgumentParser) -> None:
    """Options of `plan import`."""
    _add_configuration(p)
    add_workload(p)
    p.set_defaults(precision="")  # what the configuration says
    add_machine(p)
    g = p.add_argument_group("output")
    g.add_argument(
        "-o", dest="output", metavar="FILE", help="strategy file (default: CONFIG.plan.json)"
    )
    g.add_argument("--quiet", action="store_true", help="no summary and no progress")
    g.add_argument("--force", action="store_true", help="overwrite the file")


def tune(p: argparse.ArgumentParser) -> None:
    """Options of `plan tune`."""
    _add_configuration(p)
    add_workload(p)
    p.set_defaults(precision="")  # what the configuration says
    add_machine(p)
    add_anchor(p)
    p.add_argument(
        "--confirm",
        default="",
        metavar="WHERE",
        help="gpu:h100 or tpu:v5e:4x4: compile the best three, as programs of ours",
    )
    g = p.add_argument_group("output")
    g.add_argument(
        "-o",
        dest="output",
        metavar="FILE",
        help="the better settings (default: CONFIG.tuned and its suffix)",
    )
    g.add_argument("--json", action="store_true", help="what was found as JSON")
    g.add_argument("--quiet", action="store_true", help="no progress")
    g.add_argument("--force", action="store_true", help="overwrite the file")


def launch(p: argparse.ArgumentParser) -> None:
    """Options of `plan launch`; what follows -- is the program's."""
    saved(p)
    p.add_argument(
        "--devices",
        metavar="auto",
        help=(
            "STRATEGY is a folder of plan sweep -o DIR: the plan of most devices that fits those"
            " that came up"
        ),
    )
    _add_launch_places(p.add_argument_group("where (one of these)"))
    g = p.add_argument_group("how")
    _add_launch_processes(g)
    _add_launch_scripts(g)
    g.add_argument(
        "-o",
        dest="output",
        metavar="DIR",
        help="folder of program, logs and scripts (default MODEL.launch)",
    )
    g.add_argument(
        "--force", action="store_true", help="overwrite a program that this command did not write"
    )
    p.set_defaults(arguments=())


def _add_launch_places(g: argparse._ArgumentGroup) -> None:
    """Where `plan launch` starts the processes, or the kind of files it writes instead."""
    g.add_argument(
        "--local",
        type=whole,
        metavar="N",
        help="N processes on this machine, on virtual CPU devices",
    )
    g.add_argument(
        "--nnodes",
        type=span,
        metavar="N",
        help=(
            "this node is one of N that run this command (of 2..8 with --devices auto); ranks are"
            " given as they join"
        ),
    )
    g.add_argument(
        "--hostfile",
        metavar="FILE",
        help="lines HOST slots=N [rank=I]: a process on each, through ssh",
    )
    g.add_argument(
        "--to",
        metavar="KIND",
        help="write files instead: slurm, mpirun, kubernetes, gke-tpu, skypilot or xpk",
    )


def _add_launch_processes(g: argparse._ArgumentGroup) -> None:
    """How the processes of `plan launch` join, what they run on and for how long they are waited
    for."""
    g.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="with --nnodes: where nodes join, an address of one of them",
    )
    g.add_argument(
        "--slots",
        type=whole,
        metavar="N",
        help=(
            "with --devices auto: devices of a process (default: those that are here, else a node"
            " of the plans)"
        ),
    )
    g.add_argument(
        "--timeout",
        type=seconds,
        default=600.0,
        metavar="S",
        help="seconds for nodes to join, and for processes to write nothing (default 600)",
    )
    g.add_argument(
        "--cpu",
        action="store_true",
        help="virtual CPU devices in place of the planned ones (--local implies it)",
    )
    g.add_argument(
        "--backend",
        default="shard_map",
        metavar="NAME",
        help="of the program: shard_map (default) or jit",
    )
    g.add_argument(
        "--python",
        metavar="FILE",
        help="the interpreter that runs it (default this one; python3 in scripts)",
    )


def _add_launch_scripts(g: argparse._ArgumentGroup) -> None:
    """What the files that `plan launch --to` writes ask a cluster for."""
    g.add_argument(
        "--image",
        default="",
        metavar="NAME",
        help="with --to kubernetes, gke-tpu, skypilot, xpk: a container image with jax",
    )
    g.add_argument(
        "--volume",
        default="",
        metavar="CLAIM",
        help=(
            "with --to kubernetes, gke-tpu: a PersistentVolumeClaim, at /data; with skypilot: a"
            " volume or gs://, s3://; with xpk: a storage of its own"
        ),
    )
    g.add_argument(
        "--time",
        type=duration,
        metavar="T",
        help=(
            "with --to: a run's limit, such as 90m, 12h or 3d (default for slurm: twice what"
            " --steps take)"
        ),
    )
    g.add_argument(
        "--node-label",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="with --to kubernetes: of its nodes (default: the GPU's product)",
    )
    g.add_argument(
        "--rdma",
        default="rdma/ib",
        metavar="NAME",
        help="with --to kubernetes: what GPUs of several nodes ask for, or none (default rdma/ib)",
    )
    g.add_argument(
        "--queue",
        default="",
        metavar="NAME",
        help="with --to kubernetes, gke-tpu: the LocalQueue of Kueue that admits the job",
    )


def weights(p: argparse.ArgumentParser) -> None:
    """Options of `plan weights`."""
    add_model(p)
    g = p.add_argument_group("checkpoint")
    g.add_argument(
        "--from",
        dest="source",
        required=True,
        metavar="DIR",
        help="folder with model.safetensors, or its shards and index",
    )
    g.add_argument(
        "--back",
        metavar="FILE",
        help=(
            "write DIR anew, as the folder -o, with the values that a program's --export wrote to"
            " this file"
        ),
    )
    g.add_argument(
        "--partial",
        action="store_true",
        help="parameters that DIR lacks are left out: programs draw them anew",
    )
    g.add_argument(
        "-o",
        dest="output",
        metavar="FILE.safetensors",
        help="what to write, for a program's --weights (default: only say what matches)",
    )
    g.add_argument("--force", action="store_true", help="overwrite the file")


def verify(p: argparse.ArgumentParser) -> None:
    """Options of `plan verify`."""
    saved(p)
    p.add_argument(
        "--backend",
        default="shard_map",
        metavar="NAME",
        help="shard_map (default) or jit, as for plan emit, whose program is what is compiled",
    )
    p.add_argument("--unroll", action="store_true", help="the program of plan emit --unroll")
    p.add_argument(
        "--target",
        default="cpu",
        metavar="WHERE",
        help=(
            "cpu (virtual devices, default), gpu:h100 or tpu:v5e:4x4: compiled without the hardware"
        ),
    )
    p.add_argument(
        "--compute",
        default="plan",
        metavar="TYPE",
        help="with another target than cpu: plan (default), bfloat16 or float32",
    )
    p.add_argument("--no-run", action="store_true", help="compile and compare figures, run nothing")
    p.add_argument(
        "--tolerance",
        type=positive,
        metavar="X",
        help=(
            "cpu: largest error of outputs and gradients (default 1e-4); else: largest difference"
            " of a judged figure"
        ),
    )
    p.add_argument(
        "--time-limit",
        type=seconds,
        metavar="S",
        help="seconds for compiling and running (default 900)",
    )


def compare(p: argparse.ArgumentParser) -> None:
    """Options of `plan compare`."""
    add_model(p)
    add_machine(p)
    add_anchor(p)
    add_search(p, solver=False)


def sweep(p: argparse.ArgumentParser) -> None:
    """Options of `plan sweep`."""
    add_model(p, many=True)
    add_machine(p, many=True)
    g = p.add_argument_group("a whole run")
    g.add_argument(
        "--tokens",
        type=amount,
        metavar="N",
        help=(
            "tokens (or samples) to train on, such as 2T: days, device-hours, cost and energy of"
            " each row"
        ),
    )
    g.add_argument(
        "--price",
        metavar="P",
        help=(
            "USD per device-hour, 2.4/h or h100=2.4,v5e=1.1 (default: the dated list price of the"
            " hardware)"
        ),
    )
    g.add_argument(
        "--deadline",
        type=duration,
        metavar="T",
        help="30d, 12h or 2w: which rows keep it, and which does so most cheaply",
    )
    g.add_argument(
        "--budget", type=amount, metavar="USD", help="1M: which row is done first within it"
    )
    add_search(p)
    p.add_argument(
        "--pareto",
        action="store_true",
        help="the plans of each point that no other betters in both time and memory",
    )
    p.add_argument("--json", action="store_true", help="rows and answers as JSON")
    p.add_argument(
        "-o",
        dest="output",
        metavar="DIR",
        help=(
            "store the plan of each row there (made if need be): for plan show, emit, and launch"
            " --devices auto"
        ),
    )


def ops(p: argparse.ArgumentParser) -> None:
    """Options of `plan ops`."""
    add_model(p)
    p.add_argument(
        "--parameters",
        action="store_true",
        help="the weights instead: labels, shapes, what they feed, whether they train",
    )


def hardware(p: argparse.ArgumentParser) -> None:
    """Options of `plan hardware`."""
    p.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="a shipped device or machine, or a device file: every figure with its source",
    )
    p.add_argument("--json", action="store_true", help="the same as JSON, in base units")


def solve(p: argparse.ArgumentParser) -> None:
    """Options of `plan solve`."""
    p.add_argument(
        "problem",
        metavar="PROBLEM.json",
        help="a problem in the IOPDDL contest's JSON, gzipped or not",
    )
    p.add_argument(
        "--time-limit",
        type=seconds,
        default=60.0,
        metavar="S",
        help="seconds, reading included (default 60)",
    )
    p.add_argument(
        "--solver", default="auto", metavar="NAME", help="auto (default), dp, recursive, ilp"
    )
    p.add_argument("--seed", type=int, default=0, metavar="N")
    p.add_argument("-o", dest="output", metavar="FILE", help="write the choice: one JSON array")


def cache(p: argparse.ArgumentParser) -> None:
    """Options of `plan cache`."""
    p.add_argument(
        "--cache",
        metavar="DIR",
        help="the folder (default: MESHWRIGHT_CACHE, or ~/.cache/meshwright): --cache build/plans",
    )
    p.add_argument(
        "--clear", action="store_true", help="remove what is kept there, and nothing else"
    )


def calibrate(p: argparse.ArgumentParser) -> None:
    """Options of `plan calibrate`."""
    p.add_argument(
        "-o",
        dest="output",
        required=True,
        metavar="FILE.toml",
        help="the device file to write, for --hardware",
    )
    p.add_argument(
        "--hardware",
        metavar="NAME|FILE",
        help=(
            "the device whose data sheet this is (default: the shipped one that jax names); with"
            " --runs, the one to start from"
        ),
    )
    p.add_argument("--force", action="store_true", help="overwrite FILE.toml")
    g = p.add_argument_group("measure the devices here")
    g.add_argument(
        "--devices",
        type=whole,
        metavar="N",
        help="how many (default: all; on a CPU 8 virtual ones)",
    )
    g.add_argument(
        "--node-size",
        type=whole,
        metavar="N",
        help=(
            "devices of a node, where they are of several: links are then measured inside nodes and"
            " between them"
        ),
    )
    g.add_argument(
        "--quick", action="store_true", help="fewer sizes and rounds: seconds instead of a minute"
    )
    g = p.add_argument_group("or learn from runs that were measured")
    g.add_argument(
        "--runs",
        metavar="FILE.jsonl",
        help=(
            "one run a line (docs/calibrate.md): fits what a cluster reaches of the device's"
            " figures"
        ),
    )
