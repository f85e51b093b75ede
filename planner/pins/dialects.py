"""What people call axes and techniques in pins, and what they are called here.

tp dp pp cp ep              tensor, data, stage, sequence and expert; so do the long names
(tensor_parallel, context, pipeline, ...)
ddp                         data without optimizer sharding
fsdp                        the batch over so many devices, and ZeRO-3 over them; beside dp or ddp
those are the copies that each group of fsdp has (HSDP)
sp                          Megatron's: what lies between products is cut along the positions over
the tensor axis; `sp=on` beside tp, or tp's degree
zero micro vpp recompute    techniques: the ZeRO stage, microbatches, virtual stages (interleaved),
recomputation
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.errors import PlanError
from planner.execution.techniques import TECHNIQUES
from planner.sharding.layout import STAGE

AXES = {
    "tp": "tensor",
    "tensor": "tensor",
    "model": "tensor",
    "mp": "tensor",
    "dp": "data",
    "data": "data",
    "pp": STAGE,
    "pipeline": STAGE,
    "cp": "sequence",
    "context": "sequence",
    "sequence": "sequence",
    "ep": "expert",
    "expert": "expert",
    "fsdp": "fsdp",
}
SPOKEN_TECHNIQUES = {t.spoken: t.name for t in TECHNIQUES if t.spoken}
LONG = {
    "data_parallel_replicate": "data",
    "dp_replicate": "data",
    "data_parallel_shard": "fsdp",
    "dp_shard": "fsdp",
    **{name: t.name for t in TECHNIQUES for name in t.long_names},
}
"""Names of frameworks that are more than a name here with an ending."""
FLAGS = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False, 0: False}
SPOKEN = ", ".join(
    ("tp", "dp", "pp", "cp", "ep", "sp", "fsdp", "ddp", *SPOKEN_TECHNIQUES, "recompute")
)
"""The short names, for help."""


def axis_meant(name: str) -> str:
    """The axis that a name means; numbers stay (model2: tensor2), and so do names that mean
    none."""
    plain = name.rstrip("0123456789")
    return (
        AXES.get(plain, plain) + name[len(plain) :]
        if plain in AXES and (plain == name or len(plain) > 2)
        else name
    )


def key_meant(name: str) -> str:
    """The axis or technique that the key of a short form means: in any case, with dashes, and with
    what frameworks write behind it."""
    plain = name.strip().lower().replace("-", "_")
    for ending in ("_size", "_degree", "_parallelism", "_parallel", "_model"):
        plain = plain.removesuffix(ending)
    return SPOKEN_TECHNIQUES.get(plain, axis_meant(LONG.get(plain, plain)))


def settle(
    mesh: dict[str, tuple[int, ...]], techniques: dict[str, Any], said: Mapping[str, Any]
) -> None:
    """What `fsdp`, `ddp` and `sp` say beside an axis, added to pins. said: the last two, as given.
    Raises PlanError P020, P024."""
    if "ddp" in said:
        if "data" in mesh:
            raise PlanError(
                "P020",
                "data is pinned twice, by ddp and by dp",
                help=["leave one of them; with fsdp beside it, dp is the number of copies"],
            )
        mesh["data"] = (_degree("ddp", said["ddp"]),)
        if "fsdp" not in mesh and techniques.setdefault("zero_stage", 0) != 0:
            raise _both(
                f"ddp = {said['ddp']}",
                f"zero_stage = {techniques['zero_stage']}",
                "DDP keeps the whole optimizer state on every device",
                f"dp={said['ddp']},zero={techniques['zero_stage']}",
            )
    if "sp" in said:
        _positions(mesh, techniques, said["sp"])
    if "fsdp" in mesh:
        techniques.setdefault("zero_stage", 3)


def flag_meant(said: Any) -> bool | None:
    """On or off; None for anything else."""
    return (
        FLAGS.get(said.lower() if isinstance(said, str) else said)
        if isinstance(said, int | str)
        else None
    )


def _positions(mesh: dict[str, tuple[int, ...]], techniques: dict[str, Any], said: Any) -> None:
    degrees = mesh.get("tensor", ())
    flag = flag_meant(said)
    if flag is None:
        degree = _degree("sp", said)
        if degree == 1 and degrees not in ((), (1,)):
            raise PlanError(
                "P020",
                f"sp = 1 beside tp = {degrees[0]}: on, or one device?",
                help=["sp=on or sp=off"],
            )
        if degrees and degrees != (degree,):
            raise _both(
                f"sp = {degree}",
                f"tensor = {degrees[0]}",
                "Megatron's sequence parallelism is over the tensor axis, as wide",
                f"sp=on, or cp={degree} for an axis of its own",
            )
        if degree == 1:
            return
        mesh["tensor"] = (degree,)
    if (
        held := techniques.setdefault("tensor", "megatron-sp" if flag is not False else "megatron")
    ) != ("megatron" if flag is False else "megatron-sp"):
        raise _both(
            f"sp = {said}",
            f"tensor = {held!r}",
            "only megatron-sp cuts positions between products",
            "leave one of them out",
        )


def _degree(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(
            "P020",
            f"{key} = {value!r} is not possible",
            help=["a number of devices" + (", on or off" if key == "sp" else "")],
        )
    return value


def _both(a: str, b: str, why: str, instead: str) -> PlanError:
    return PlanError("P024", f"pins {a} and {b} contradict each other: {why}", help=[instead])
