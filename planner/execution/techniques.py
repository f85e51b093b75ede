"""The techniques of a step, declared once each.

A record says how users pin a technique and what values it takes, what contradicts it, which
requests refuse it, its key in strategy files, its field of a plan, its words for people, and what
it does to time and memory. Pins, strategy files and their schemas, requests, the search's cache,
reports and exports read these records (docs/adding-a-technique.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as a_field
from typing import Any, Literal

from costmodels.frameworks.step_time import DUALPIPE
from costmodels.hardware.units import UnitError, show_bytes, size_bytes
from planner.errors import PlanError
from planner.execution.plan import Plan, StepTechniques
from planner.execution.save_policies import (
    fault,
    is_named,
    offloaded_values,
    policy_words,
    read_policy,
)
from planner.execution.zero_stages import ZERO_STAGES
from planner.sharding.layout import ISLAND, STAGE

SCHEDULE_WORDS = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "interleaved 1F1B",
    "zb-h1": "zero bubble, ZB-H1",
    DUALPIPE: "DualPipe",
}
BLOCK_KEEP = "block-keep"
RECOMPUTE = ("none", BLOCK_KEEP, "block")
"""What a plan may compute again: nothing, blocks with the results of collectives saved, or blocks
whole. The dearest in memory first."""
RECOMPUTED = {"block": "recompute", BLOCK_KEEP: "recompute, collectives saved"}
"""The same in words."""
_RECOMPUTE_WORDS: dict[str, str] = dict(zip(RECOMPUTE, RECOMPUTE, strict=True)) | {
    "selective": BLOCK_KEEP
}
"""What pins call these; planner.execution.save_policies has those with values saved by name."""
INTERLEAVED = "interleaved"
ZB_H1 = "zb-h1"
SCHEDULES = ("1f1b", "gpipe", INTERLEAVED, ZB_H1, DUALPIPE)
MAX_ZERO_STAGE = {"1f1b": 2, "gpipe": 1, INTERLEAVED: 2, ZB_H1: 1, DUALPIPE: 1}
"""ZeRO stages that go with pipeline stages: stage 3 would gather weights anew in every tick, under
gpipe there is one backward pass for all microbatches, and under zb-h1 gradients of weights are made
in ticks of their own."""
WIDEST = 2
"""Places along the axis "stage" that an uneven pipeline stage takes at most. Fewer stages of two
places have no shorter bubble than one place each: bounds of the one hold of the other
(tests/execution/test_uneven.py)."""
OFFLOAD = ("optimizer", "activations", "parameters", "embeddings")
"""What may wait in the host's memory: the optimizer's state (moments and master copies), from one
step to the next; what is handed from block to recomputed block, from the forward to the backward
pass; weights of recomputed blocks, with their gradients; tables that are looked up alone, with
theirs."""
WEIGHTS = ("parameters", "embeddings")
"""Of OFFLOAD what is kept with gradients and state: without pipeline stages, one microbatch at a
time."""
IN_LOOPS = ("activations", "parameters")
"""Of OFFLOAD what is sent and brought by loops over recomputed blocks: without pipeline stages."""
OFFLOADED = {
    "optimizer": "optimizer state",
    "activations": "what enters blocks",
    "parameters": "blocks' weights and gradients",
    "embeddings": "embedding tables",
}
"""The same in words."""
_OFFLOAD_TYPE = (
    Literal[
        "none",
        "optimizer",
        "activations",
        "optimizer+activations",
        "optimizer+parameters",
        "optimizer+embeddings",
        "optimizer+activations+parameters",
        "optimizer+activations+embeddings",
        "optimizer+parameters+embeddings",
        "optimizer+activations+parameters+embeddings",
    ]
    | list[Literal["optimizer", "activations", "parameters", "embeddings"]]
)
WAITING, BESIDE = "waiting", "beside"
"""How exchanges of experts' rows run: kernels wait for them, or those of another microbatch run
beside them."""
LOOPED, WRITTEN_OUT = "looped", "written-out"
"""How a program runs its repeated blocks: as a loop over stacks of their weights and of what they
save, or one after the other, each with arrays of its own."""
COPIES = (1, 2)
"""Microbatches that may run at the same time."""
AUTO = "auto"
"""The pinned size of buckets that stands for the best."""
TENSOR = ("any", "megatron", "megatron-sp")

INFERENCE, FRAMEWORK, PARTITIONER, NO_GPU = "inference", "framework", "partitioner", "no GPU"
ALL_WAIT = "all wait"
"""Requests that may refuse a technique: inference, runtimes that are priced as a framework runs,
programs whose collectives the compiler's partitioner places, devices other than GPUs, and runtimes
whose kernels wait for exchanges of experts' rows."""
_NO_BACKWARD = "inference has no backward pass, and takes its batch at once"
_AS_FRAMEWORK = "--runtime {runtime} is priced as that framework runs"
_STAGES = "pipeline stages are"

Values = Mapping[str, Any]
"""Technique -> its value; those that are open are missing."""
Sizes = Mapping[str, tuple[int, ...]]
"""Mesh axis -> the sizes it may have."""


@dataclass(frozen=True)
class Contradiction:
    """Techniques that do not go together, and why; single: the text is of one technique alone.
    help: what to ask for instead."""

    text: str
    help: str
    single: bool = False


@dataclass(frozen=True)
class Technique:
    """One technique.

    name         in pins
    effect       how it changes time and memory, a sentence
    neutral      the value of a step without it
    choices      the values it may have beside the neutral one; none, and no `read`: any positive
                 number
    members      what its values are made of, each at most once
    read         a pin's value as written -> as used; raises PlanError P020
    faulty       what is wrong with a plan's value, where choices and members do not say it
    shown        a value as one would pin it
    in_pins      a value as a TOML file of pins holds it
    pin_type     its type there; None: it cannot be pinned
    spoken       its short name in pins; long_names: what frameworks call it; spoken_values: other
                 words for its values
    field        of StepTechniques, "" where it is no part of a plan
    key          in the table `techniques` of strategy files, "" where it is not there
    file_type    its type there; file_neutral: what stands for the neutral value there, where that
                 is another; optional: only other values than the neutral one are written
    structural   the search solves one problem for each of its values (planner.space.assemble)
    staged       it is one of pipeline stages
    of_axes      it says what whole mesh axes do: no axis is taken apart where it is pinned
    refused      the requests that refuse it, and why
    contradicted what it contradicts, of techniques and sizes of mesh axes
    words        a value in a table of plans
    """

    name: str
    effect: str
    neutral: Any
    choices: tuple[Any, ...] = ()
    members: tuple[str, ...] = ()
    read: Callable[[Any], Any] | None = None
    faulty: Callable[[Any], str] = lambda value: ""
    shown: Callable[[Any], str] = str
    in_pins: Callable[[Any], Any] = lambda value: value
    pin_type: Any = None
    spoken: str = ""
    long_names: tuple[str, ...] = ()
    spoken_values: Mapping[str, str] = a_field(default_factory=dict)
    field: str = ""
    key: str = ""
    file_type: Any = None
    file_neutral: Any = None
    optional: bool = False
    structural: bool = False
    staged: bool = False
    of_axes: bool = False
    refused: Mapping[str, str] = a_field(default_factory=dict)
    contradicted: Callable[[Values, Sizes], Contradiction | None] = lambda values, sizes: None
    words: Callable[[Any], str] = lambda value: ""

    def of_pin(self, value: Any) -> Any:
        """A pin's value as it is used. Raises PlanError P020 for one that is not possible."""
        if self.read is not None:
            return self.read(value)
        value = self.spoken_values.get(value, value) if isinstance(value, str) else value
        if value in self.choices if self.choices else isinstance(value, int) and value >= 1:
            return value
        raise _not_possible(
            self.name,
            value,
            f"one of {', '.join(map(str, self.choices))}" if self.choices else "a positive number",
        )

    def among(self, values: Values) -> Any:
        """The technique's value among those that are fixed, the neutral one where it is open."""
        return values.get(self.name, self.neutral)

    def of_file(self, table: Mapping[str, Any]) -> Any:
        """The technique's value in a file's table of techniques, as a plan has it."""
        value = table.get(self.key, self.neutral)
        value = self.neutral if value == self.file_neutral else value
        return tuple(value) if isinstance(value, list) else value

    def to_file(self, value: Any) -> dict[str, Any]:
        """The technique's entry of a file's table of techniques."""
        if value == self.neutral and self.optional:
            return {}
        if value == self.neutral and self.file_neutral is not None:
            return {self.key: self.file_neutral}
        return {self.key: list(value) if isinstance(value, tuple) else value}

    def wrong(self, value: Any) -> str:
        """What is wrong with the value of a plan, "" where nothing is."""
        if self.members:
            named = [*value]
            strange = set(named) - set(self.members) or len(set(named)) < len(named)
            return f"{self.key} {named!r} is not made of {', '.join(self.members)}" * bool(strange)
        if self.choices and value != self.neutral and value not in self.choices:
            return f"{self.key} {value!r} is none of {', '.join(map(str, self.choices))}"
        if isinstance(self.neutral, int) and value < self.neutral:
            return f"{self.key} {value} is less than {self.neutral}"
        return self.faulty(value)


def sent_in_loops(plan: Plan) -> list[str]:
    """What loops over the recomputed blocks of a plan send to the host's memory and bring back."""
    return [w for w in plan.in_host_memory if w in IN_LOOPS or w not in OFFLOAD]


def _not_possible(name: str, value: Any, *help: str) -> PlanError:
    return PlanError("P020", f"{name} = {value!r} is not possible", help=help)


def _joined(value: Sequence[Any]) -> str:
    return "+".join(map(str, value)) or "none"


def _offload(value: Any) -> tuple[str, ...]:
    """The offloaded things of a list, or words joined by +, in the order of OFFLOAD; "none" for
    nothing."""
    words = [] if value == "none" else value.split("+") if isinstance(value, str) else value
    if (
        not isinstance(words, list)
        or not all(isinstance(w, str) for w in words)
        or set(words) - set(OFFLOAD)
        or len(set(words)) < len(words)
    ):
        disk = "there is no offload to disks: offloaded data lies in host memory (docs/offload.md)"
        raise _not_possible(
            "offload",
            value,
            f"none, or of {', '.join(OFFLOAD)}, joined by +",
            *([disk] if "disk" in str(value) else []),
        )
    return tuple(w for w in OFFLOAD if w in words)


def _offload_words(offload: Sequence[str]) -> str:
    *others, last = [OFFLOADED[what] for what in offload] or [""]
    return (
        f"{', '.join(others)}{' and ' if others else ''}{last} offloaded to host memory"
        if last
        else ""
    )


def _widths(value: Any) -> tuple[int, ...]:
    """Stage widths of a list, or numbers joined by +."""
    words = (
        [int(w) if w.isdecimal() else 0 for w in value.split("+")]
        if isinstance(value, str)
        else value
    )
    if (
        not isinstance(words, list | tuple)
        or not words
        or not all(type(n) is int and 1 <= n <= WIDEST for n in words)
    ):
        raise _not_possible(
            "widths",
            value,
            f"1 to {WIDEST} positions of the stage axis for each stage, joined by +:"
            f" widths={WIDEST}+1+1 with pp=4",
        )
    return tuple(words)


def _islands(value: Any) -> tuple[int, ...]:
    raise _not_possible("islands", value, "shares follow from --hardware 8xh100-sxm+8xa100-80gb")


def _bucket(value: Any) -> int | str:
    """Bytes of a size; AUTO, or 0 for "none"."""
    if value in ("none", AUTO):
        return 0 if value == "none" else AUTO
    try:
        size = value if type(value) is int else size_bytes(value)
    except UnitError:
        size = 0
    if size < 1:
        raise _not_possible("bucket", value, "a size such as 25MB or 32MiB, auto, or none")
    return size


def _staged(sizes: Sizes) -> bool:
    return bool(set(sizes.get(STAGE, ())) - {1})


def _schedule_of_chunks(values: Values, sizes: Sizes) -> Contradiction | None:
    schedule, chunks = values.get("schedule"), values.get("virtual")
    if schedule is None or chunks is None or (schedule == INTERLEAVED) == (chunks > 1):
        return None
    return Contradiction(
        f"schedule = {schedule or 'none'!r} and virtual = {chunks} contradict each other:"
        f" {INTERLEAVED} schedules have several virtual stages per stage, others one",
        "remove one of them",
    )


def _uneven_stages(values: Values, sizes: Sizes) -> Contradiction | None:
    if not (widths := values.get("widths", ())):
        return None
    stages, chunks = sizes.get(STAGE, ()), values.get("virtual", 1)
    schedule, micro = values.get("schedule"), values.get("microbatches", WIDEST)
    if not stages:
        other = "no stages"
    elif sum(widths) not in stages:
        other = f"stage = {' or '.join(map(str, stages))}"
    elif chunks > 1:
        other = f"virtual = {chunks}"
    elif schedule in (INTERLEAVED, ZB_H1, DUALPIPE):
        other = f"schedule = {schedule!r}"
    elif micro % max(widths):
        other = f"microbatches = {micro}"
    else:
        return None
    return Contradiction(
        f"widths = {_joined(widths)} and {other} contradict each other: the stages take"
        f" {sum(widths)} positions of the stage axis, one virtual stage each, and {max(widths)}"
        " microbatches go together",
        f"pp={sum(widths)}, or leave widths out",
    )


def _microbatches_at_a_time(values: Values, sizes: Sizes) -> Contradiction | None:
    copies = values.get("copies", 1)
    micro = values.get("microbatches", copies)
    if _staged(sizes) and copies > 1:
        other, instead = "stages", "remove one of them"
    elif micro % copies:
        other, instead = f"microbatches = {micro}", f"a multiple of {copies} microbatches"
    else:
        return None
    return Contradiction(
        f"copies = {copies} and {other} contradict each other: {copies} microbatches overlap,"
        " without pipeline stages",
        instead,
    )


def _without_loops(values: Values, sizes: Sizes) -> Contradiction | None:
    if values.get("blocks", LOOPED) == LOOPED:
        return None
    recompute, sent = values.get("recompute", "none"), values.get("offload", ())
    if recompute != "none":
        other, instead = f"recompute = {recompute!r}", "recompute=none"
    elif values.get("zero_stage", 0) == 3:
        other, instead = "zero_stage = 3", "zero=2 or less"
    elif _staged(sizes):
        other, instead = "stages", "remove one of them"
    elif values.get("copies", 1) > 1:
        other, instead = f"copies = {values['copies']}", "copies=1"
    elif beyond := _joined([w for w in sent if w in (*IN_LOOPS, *WEIGHTS)]).replace("none", ""):
        other, instead = f"offload = {beyond!r}", "offload=none"
    else:
        return None
    return Contradiction(
        f"blocks = {WRITTEN_OUT} and {other} contradict each other: that is done by loops over"
        " blocks",
        instead,
    )


def _beside_what(values: Values, sizes: Sizes) -> Contradiction | None:
    if values.get("exchanges", WAITING) == WAITING:
        return None
    if values.get("recompute") == "block":
        other, instead = "recompute = block", "recompute=none or block-keep"
    elif _staged(sizes) and values.get("virtual") == 1 and values.get("schedule") != DUALPIPE:
        other, instead = "stages without virtual ones", "vpp=2 or more"
    else:
        return None
    return Contradiction(
        f"exchanges = {BESIDE} and {other} contradict each other: forward and backward passes of"
        " two microbatches run side by side",
        instead,
    )


def _what_is_offloaded(values: Values, sizes: Sizes) -> Contradiction | None:
    offload = values.get("offload", ())
    in_loops, weights = (_joined([w for w in offload if w in of]) for of in (IN_LOOPS, WEIGHTS))
    stages = "stages" if _staged(sizes) else ""
    other = f"recompute = {values['recompute']!r}" if values.get("recompute") == "none" else stages
    if stages and (named := offloaded_values(str(values.get("recompute", "")))):
        return Contradiction(
            f"recompute offloads {', '.join(named)} and stages contradict each other: values of"
            " blocks are sent without pipeline stages",
            "remove one of them",
        )
    if in_loops != "none" and other:
        return Contradiction(
            f"offload = {in_loops!r} and {other} contradict each other: those of recomputed blocks"
            " are sent, without pipeline stages",
            "remove one of them",
        )
    other = "copies" if values.get("copies", 1) > 1 else stages
    if weights != "none" and other:
        return Contradiction(
            f"offload = {weights!r} and {other} contradict each other: weights are fetched for"
            " one microbatch at a time",
            "remove one of them",
        )
    if weights != "none" and "optimizer" not in offload:
        return Contradiction(
            f"offload = {weights!r} leaves the optimizer's state on the devices, which takes more"
            " room and is read once a step",
            f"offload=optimizer+{weights}",
            single=True,
        )
    return None


TECHNIQUES = (
    Technique(
        name="zero_stage",
        effect="A ZeRO stage cuts the optimizer's state (1), gradients (2) and parameters (3) over"
        " the devices that hold the same weights: less memory, and from stage 3 on gathers of the"
        " parameters where they are used.",
        neutral=0,
        choices=ZERO_STAGES,
        pin_type=Literal[ZERO_STAGES],
        spoken="zero",
        field="zero_stage",
        key="zero_stage",
        file_type=int,
        structural=True,
        refused={INFERENCE: _NO_BACKWARD},
        words=lambda stage: f"ZeRO-{stage}",
    ),
    Technique(
        name="microbatches",
        effect="The batch goes through the model in so many parts: activations of one part at a"
        " time, smaller and slower kernels, and gradients that are summed up.",
        neutral=1,
        pin_type=int,
        spoken="micro",
        long_names=("num_microbatches", "gradient_accumulation", "gradient_accumulation_steps"),
        field="microbatches",
        key="microbatches",
        file_type=int,
        structural=True,
        refused={INFERENCE: _NO_BACKWARD},
        words=lambda n: f"{n} microbatches",
    ),
    Technique(
        name="schedule",
        effect="The order in which pipeline stages run microbatches: how long they wait, and for"
        " how many microbatches they save activations (planner.execution.pipeline).",
        neutral="",
        choices=SCHEDULES,
        pin_type=Literal[SCHEDULES],
        field="schedule",
        key="schedule",
        file_type=str,
        file_neutral="none",
        structural=True,
        staged=True,
        refused={PARTITIONER: _STAGES},
        words=SCHEDULE_WORDS.__getitem__,
    ),
    Technique(
        name="virtual",
        effect="Virtual stages: each pipeline stage holds so many chunks of blocks, which shortens"
        " the bubble, saves more activations and sends more often.",
        neutral=1,
        pin_type=int,
        spoken="vpp",
        long_names=("virtual_pipeline",),
        field="virtual_stages",
        key="virtual",
        file_type=int,
        optional=True,
        structural=True,
        staged=True,
        refused={INFERENCE: _NO_BACKWARD, PARTITIONER: _STAGES},
        contradicted=_schedule_of_chunks,
        words=lambda chunks: f"{chunks} virtual stages per stage",
    ),
    Technique(
        name="recompute",
        effect="Blocks run their forward pass again in the backward pass, with or without their"
        " collectives, instead of saving its activations; or all but what named values save.",
        neutral="none",
        read=lambda value: read_policy(value, _RECOMPUTE_WORDS),
        faulty=lambda value: fault(value, RECOMPUTE),
        pin_type=str,
        field="recompute",
        key="recompute",
        file_type=str,
        structural=True,
        refused={INFERENCE: _NO_BACKWARD},
        words=lambda mode: RECOMPUTED.get(mode) or policy_words(mode),
    ),
    Technique(
        name="offload",
        effect="What is named waits in the host's memory while it is not used: less memory of the"
        " device, and time on the link to the host.",
        neutral=(),
        members=OFFLOAD,
        read=_offload,
        shown=_joined,
        in_pins=list,
        pin_type=_OFFLOAD_TYPE,
        field="offload",
        key="offload",
        file_type=list[str],
        refused={
            INFERENCE: "inference keeps no optimizer state",
            FRAMEWORK: _AS_FRAMEWORK,
            PARTITIONER: "offload to host memory is",
        },
        contradicted=_what_is_offloaded,
        words=_offload_words,
    ),
    Technique(
        name="bucket",
        effect="Collectives of gradients and updated parameters are sent together up to so many"
        " bytes: fewer launches, a buffer, and less that hides behind the backward pass.",
        neutral=0,
        read=_bucket,
        shown=lambda size: str(size or "none"),
        in_pins=lambda size: size or "none",
        pin_type=int | str,
        field="bucket_bytes",
        key="fused_collective_bytes",
        file_type=int,
        refused={
            NO_GPU: "the compiler for {kind} has no such setting",
            INFERENCE: "inference has nothing that waits to be sent together",
            FRAMEWORK: _AS_FRAMEWORK,
        },
        words=lambda size: f"collectives fused up to {show_bytes(size)}",
    ),
    Technique(
        name="copies",
        effect="So many microbatches run at the same time, the communication of one under the"
        " products of another: less exposed communication, more activations.",
        neutral=1,
        choices=COPIES,
        pin_type=Literal[COPIES],
        field="overlapped_microbatches",
        key="copies",
        file_type=int,
        refused={
            INFERENCE: "inference has no microbatches",
            FRAMEWORK: _AS_FRAMEWORK,
            PARTITIONER: "overlapped microbatches (copies) are",
        },
        contradicted=_microbatches_at_a_time,
        words=lambda copies: f"{copies} overlapped",
    ),
    Technique(
        name="blocks",
        effect="Repeated blocks are written out one after the other instead of as a loop: nothing"
        " is copied out of stacks and into them, and compiling takes longer.",
        neutral=LOOPED,
        choices=(LOOPED, WRITTEN_OUT),
        pin_type=Literal["looped", "written-out"],
        field="blocks",
        key="blocks",
        file_type=str,
        optional=True,
        refused={FRAMEWORK: _AS_FRAMEWORK},
        contradicted=_without_loops,
        words=lambda how: "blocks written out",
    ),
    Technique(
        name="exchanges",
        effect="Experts' rows of one microbatch are sent beside kernels of another, which that"
        " slows: less exposed communication, and a microbatch more in flight.",
        neutral=WAITING,
        choices=(WAITING, BESIDE),
        pin_type=Literal["waiting", "beside"],
        field="exchanges",
        key="exchanges",
        file_type=str,
        optional=True,
        refused={
            INFERENCE: "inference has no other microbatch",
            ALL_WAIT: "programs of --runtime {runtime} wait for experts' rows",
        },
        contradicted=_beside_what,
        words=lambda how: "experts' rows sent beside other kernels",
    ),
    Technique(
        name="zero_group",
        effect="So many neighbouring devices share one copy of what the ZeRO stage cuts:"
        " collectives over fast links, more memory. A plan names the mesh axes of the group.",
        neutral=(),
        pin_type=int,
        field="zero_axes",
        key="zero_group",
        file_type=list[str],
        of_axes=True,
        refused={INFERENCE: _NO_BACKWARD},
    ),
    Technique(
        name="widths",
        effect='Uneven pipeline stages take so many places of the axis "stage" each: a stage of two'
        " runs two microbatches at a time.",
        neutral=(),
        read=_widths,
        shown=_joined,
        in_pins=list,
        pin_type=str | list[int],
        field="stage_widths",
        key="widths",
        file_type=list[int],
        optional=True,
        staged=True,
        contradicted=_uneven_stages,
    ),
    Technique(
        name="islands",
        effect='Places along the axis "island" run as many microbatches as their speed allows.',
        neutral=(),
        read=_islands,
        shown=_joined,
        field="islands",
        key="islands",
        file_type=list[int],
        optional=True,
        words=lambda turns: f"{_joined(turns)} of them by island",
    ),
    Technique(
        name="tensor",
        effect='What the axis "tensor" may cut: anything, or as Megatron does columns and rows, and'
        " positions between products; it leaves fewer plans to choose from.",
        neutral=TENSOR[0],
        choices=TENSOR,
        pin_type=Literal[TENSOR],
        of_axes=True,
    ),
)
"""Every technique, in the order in which plans are put into words."""
BY_NAME = {t.name: t for t in TECHNIQUES}
OF_PLANS = tuple(t for t in TECHNIQUES if t.field)
STRUCTURAL = tuple(t for t in TECHNIQUES if t.structural)


def may_be_written_out(plan: Plan) -> bool:
    """Whether a plan does nothing that only loops over blocks do."""
    values = {t.name: getattr(plan, t.field) for t in OF_PLANS} | {"blocks": WRITTEN_OUT}
    islands = plan.islands or ISLAND in plan.order
    return not islands and _without_loops(values, {STAGE: (plan.stages,)}) is None


def read_table(table: Mapping[str, Any]) -> StepTechniques:
    """The techniques of a strategy file's table; those that it does not name are neutral."""
    return StepTechniques(**{t.field: t.of_file(table) for t in OF_PLANS})


def write_table(techniques: StepTechniques) -> dict[str, Any]:
    """The techniques of a plan as a strategy file's table."""
    table: dict[str, Any] = {}
    for t in OF_PLANS:
        table |= t.to_file(getattr(techniques, t.field))
    return table


def recompute_rank(recompute: str) -> int:
    """Order among values of recompute, the simplest first; those with names are last."""
    return len(RECOMPUTE) if is_named(recompute) else RECOMPUTE.index(recompute)


def contradiction(values: Values, sizes: Sizes) -> Contradiction | None:
    """The first that techniques and a mesh have among them."""
    contradictions = (t.contradicted(values, sizes) for t in TECHNIQUES)
    return next((c for c in contradictions if c is not None), None)


def phrases(techniques: StepTechniques, only: Sequence[str] = ()) -> list[str]:
    """What is out of the ordinary, a phrase for each technique. only: of these, by name."""
    return [
        words
        for t in OF_PLANS
        if (not only or t.name in only) and getattr(techniques, t.field) != t.neutral
        if (words := t.words(getattr(techniques, t.field)))
    ]
