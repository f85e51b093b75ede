"""What options are called by other tools, and how the same is typed here."""

from __future__ import annotations

_DEVICES = "--devices N, of all nodes together; --hardware NAME says which"
_PRECISION = "--precision bf16-mixed (default), bf16-pure, fp16, fp8 or fp32"
_LENGTH = "zoo:NAME,seq=N, or --dim NAME=N of a model with such a dimension (`plan ops` lists them)"
_BATCH = "--batch N, the sequences or samples of one step on all devices together"
_MICRO = "--pin micro=N, the microbatches of a step"
_MEMORY = "--memory-limit 60GiB, of one device"
_MACHINE = "--hardware NAME; `plan hardware` lists the devices and machines that ship"
_INFER = "--workload infer"

OTHER_NAMES = {
    **dict.fromkeys(
        (
            "gpus",
            "gpu",
            "num-gpus",
            "n-gpus",
            "ngpus",
            "gpus-per-node",
            "num-devices",
            "device-count",
            "world-size",
            "nproc",
            "nproc-per-node",
            "nnodes",
            "nodes",
            "num-nodes",
            "num-processes",
            "num-machines",
            "tpus",
            "chips",
            "accelerators",
            "n",
        ),
        _DEVICES,
    ),
    **dict.fromkeys(
        ("dtype", "bf16", "fp16", "fp8", "fp32", "mixed-precision", "amp", "params-dtype"),
        _PRECISION,
    ),
    **dict.fromkeys(
        (
            "seq",
            "seq-len",
            "seq-length",
            "seqlen",
            "sequence-length",
            "max-seq-len",
            "max-model-len",
            "context-length",
        ),
        _LENGTH,
    ),
    **dict.fromkeys(
        ("batch-size", "global-batch-size", "global-batch", "gbs", "train-batch-size", "bs"), _BATCH
    ),
    **dict.fromkeys(
        (
            "micro-batch-size",
            "mbs",
            "grad-accum",
            "gradient-accumulation",
            "gradient-accumulation-steps",
            "num-microbatches",
        ),
        _MICRO,
    ),
    **dict.fromkeys(
        ("memory", "memory-gb", "max-memory", "hbm", "gpu-memory", "vram", "mem"), _MEMORY
    ),
    **dict.fromkeys(
        ("gpu-type", "accelerator", "machine", "cluster", "target", "instance"), _MACHINE
    ),
    **dict.fromkeys(("inference", "infer", "serve", "serving", "forward-only"), _INFER),
    **dict.fromkeys(("train", "training"), "--workload train, the default"),
    **dict.fromkeys(("mesh", "mesh-shape"), "--pin dp=4,tp=2: the degrees that you decide"),
    **dict.fromkeys(("output", "out", "save"), "-o FILE"),
    **dict.fromkeys(("model", "config", "checkpoint"), "the model stands first: plan FILE"),
    **dict.fromkeys(("framework", "launcher", "backend-name"), "--for LAUNCHER"),
    **dict.fromkeys(("verbose", "v", "explain"), "`plan explain MODEL.plan.json` tells why"),
}


def typed_here(option: str) -> str:
    """How what `--gpus=8` or `-n` says is typed here, "" where no other name is known."""
    name = option.partition("=")[0].lstrip("-").lower().replace("_", "-")
    return OTHER_NAMES.get(name, "")
