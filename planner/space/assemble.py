"""From a space and a choice of techniques to the one problem every solver sees.

    cost[option]  = times * (microbatches * (forward + backward + recomputed forward + reduction and
                  sums each microbatch + copies of weights) + reduction once)
                  + microbatches * copies of what is saved   in picoseconds
    usage[option] = state bytes + saved activations
        in bytes
Everything that is saved is alive at the end of the last forward pass, so one live interval holds it
all; what only lives inside one operator is reserved apart (planner.pricing.peak_memory). Under
recompute a repeated block saves only what is handed from block to block, and one block's
activations at a time; with results of collectives saved, those that no layout avoids
(planner.analysis.saved_collectives).

With pipeline stages (planner.execution.pipeline) a device runs and holds its part of the blocks,
everything runs as often as there are ticks, and activations are saved of all microbatches that
wait. What stages hand to each other is counted in the smallest pieces (planner.space.handover). Of
uneven stages (planner.execution.uneven_pipeline) it is left to the price of the whole plan, as is
where the graph is cut and what runs again: here each takes an equal part of everything, which none
of the longest can be below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from costmodels.frameworks.peak_memory import in_flight
from costmodels.liveness import temporary_bytes
from planner.execution.pipeline import Pipeline, Schedule
from planner.execution.plan import Plan
from planner.execution.save_policies import is_named
from planner.execution.techniques import DUALPIPE, STRUCTURAL, ZB_H1
from planner.machine.topology import Mesh
from planner.ops.residuals import reads
from planner.pricing.frameworks.stages import share_layers_before
from planner.pricing.saved_activations import repeat_is_apart, takes_repeats_whole
from planner.sharding.rule import Split
from planner.solvers.problem import FORBIDDEN, Problem
from planner.space.axis_choices import axis_choices
from planner.space.handover import handover_s
from planner.space.live_spans import Kept, Span, forward_spans, live_spans
from planner.space.liveness_points import (
    above_saved,
    beside_sums,
    forward_bytes,
    gathered_beside,
    gone_before,
    only_in_blocks,
    outside_gradients,
)
from planner.space.named_policies import policy_costs
from planner.space.option_arrays import again_s, arrays_of, copied_s
from planner.space.variables import Space, Variable

PICO = 1e12
MOST_SLOWDOWN = 2.0
"""Ticks per microbatch of the shortest pipelines that are searched: at least stages - 1
microbatches."""


@dataclass(frozen=True)
class Techniques:
    """Structural choices around one solve. recompute: none | block | block-keep (collective results
    saved) | save:NAMES (planner.execution.save_policies). schedule, virtual_stages: of pipeline
    stages, where the space's mesh has some. microbatches: 0 stands for as many as would hide the
    bubble, in bounds.
    """

    zero_stage: int = 0
    recompute: str = "none"
    microbatches: int = 1
    schedule: str = "1f1b"
    virtual_stages: int = 1

    @classmethod
    def of(cls, plan: Plan) -> Techniques:
        """The techniques of a plan."""
        return cls(**{t.field: getattr(plan, t.field) for t in STRUCTURAL})

    def plan(
        self,
        mesh: Mesh,
        splits: Mapping[str, Split],
        runs: tuple[tuple[int, int, int], ...],
        **others: Any,
    ) -> Plan:
        """The plan of these techniques on a mesh, with its splits and repeated blocks. others:
        fields of Plan that are no structural choice."""
        values = {t.field: getattr(self, t.field) for t in STRUCTURAL if not t.staged}
        if mesh.stages > 1:
            values["schedule"] = self.schedule
        return Plan(
            mesh=mesh.shape,
            splits=splits,
            repeated_blocks=runs,
            zero_axes=mesh.zero_axes,
            virtual_stages=self.virtual_stages,
            **values,
            **others,
        )


def assemble(
    space: Space,
    techniques: Techniques,
    limit_bytes: float | None,
    *,
    uncut: bool = False,
    unit_s: float = 1 / PICO,
    liveness: bool = False,
) -> Problem:
    """The problem in integers: `unit_s` (picoseconds) and bytes; impossible conversions are
    FORBIDDEN.

    uncut: the space is that of the whole batch, or of larger microbatches (`Space.parts` of them, a
    divisor of their number). A microbatch takes at least its share of a larger one's time and of
    the activations saved (kernels and collectives lose efficiency as they shrink, padding grows),
    so this problem's optimum is a lower bound of the real one's. liveness: the limit is of every
    operator's workspace beside what is saved, each at a time of its own, not of what is saved alone
    (where `has_liveness`). Under recompute=block-keep nodes are charged as if sums were all that is
    saved, as the problem knows no bytes of other results: plans that save some are priced below
    their cost here, and bounded in planner.search.saved_collective_bounds.
    """
    ends = arrays_of(space).first[1:]
    cost = np.split(_whole(seconds_of(space, techniques, uncut) / unit_s), ends)
    usage = np.split(np.rint(bytes_of(space, techniques, uncut)).astype(np.int64), ends)
    share = space.parts if uncut else techniques.microbatches
    tables, table_of = _tables(space, techniques, share, unit_s)
    spans: list[Span] = [(0, 1, k, of_variable) for k, of_variable in enumerate(usage)]
    if liveness:
        spans = _live(space, techniques)
    return Problem(
        cost=tuple(cost),
        edges=np.array([(link.a, link.b) for link in space.links], np.int64).reshape(-1, 2),
        edge_table=np.array(table_of, np.int64),
        tables=tuple(tables),
        live_node=np.array([k for _, _, k, _ in spans], np.int64),
        live_span=np.array([span[:2] for span in spans], np.int64).reshape(-1, 2),
        live_usage=tuple(of_variable for _, _, _, of_variable in spans),
        usage_limit=None if limit_bytes is None else int(limit_bytes),
        names=tuple(v.name for v in space.variables),
        axis_choice=axis_choices(space),
        axis_size=tuple(space.pricer.sizes.values()),
        weight=np.array([v.flops for v in space.variables]),
    )


def _tables(
    space: Space, techniques: Techniques, share: int, unit_s: float
) -> tuple[list[np.ndarray], list[int]]:
    """Tables of reshards in units, in so many microbatches, and the number of each link's table.
    Links of equal costs have arrays in common, by which equal tables are found."""
    tables, table_of, number = list[np.ndarray](), list[int](), dict[tuple, int]()
    scale = link_scale(space, techniques)
    for link, recomputed, part in zip(
        space.links, recomputed_link_shares(space, techniques), scale, strict=True
    ):
        key = (id(link.forward_s), id(link.backward_s), link.count, recomputed, part)
        if key not in number:
            number[key] = len(tables)
            seconds = link.forward_s * (1 + recomputed) + link.backward_s
            tables.append(_whole(part * share * link.count / unit_s * seconds))
        table_of.append(number[key])
    return tables, table_of


def recomputes(space: Space, techniques: Techniques) -> str:
    """How the repeated blocks of a space's plans are recomputed, "" where none are."""
    return (
        "" if techniques.recompute == "none" or has_uneven_stages(space) else techniques.recompute
    )


def has_liveness(space: Space) -> bool:
    """Whether what lives only for a while is told apart by the operators that have it."""
    forward = not space.base.training
    return not has_uneven_stages(space) and (forward or not space.base.written_out)


def _live(space: Space, techniques: Techniques) -> list[Span]:
    """When what is on a device (planner.space.live_spans)."""
    zero, micro = techniques.zero_stage, techniques.microbatches
    state, saved = _state_and_saved(space, techniques, uncut=False)
    if not space.base.training:
        return forward_spans(space, state + saved)
    kept = Kept(
        state,
        saved,
        _again(space, techniques),
        state
        + saved
        - _only_in_blocks(space, techniques)
        + arrays_of(space).costs.saved_bytes_epilogue,
        state + outside_gradients(space, zero, micro)[1],
    )
    return live_spans(space, kept, *_workspaces_of(space, techniques))


def _one_repeat(space: Space, recompute: str) -> np.ndarray:
    """Bytes that one repeat of the blocks of which one is counted has beside what all save. What
    frameworks save selectively is saved of that one, too. [options]"""
    arrays = arrays_of(space)
    if recompute != "block-keep" or space.pricer.runtime.kernels is None:
        return arrays.one_repeat_bytes
    costs = arrays.costs
    remaining = (costs.saved_bytes_remat + costs.saved_collective_bytes) / arrays.count
    return np.where(arrays.one_repeat_bytes > 0, arrays.one_repeat_bytes - remaining, 0.0)


def _again(space: Space, techniques: Techniques) -> np.ndarray:
    """Bytes that one repeat of blocks has at once that are made again or cut out of stacks, of
    whatever blocks; nothing where there are none. [options]"""
    whole = takes_repeats_whole(space.base, space.pricer, techniques.zero_stage)
    one_repeat = arrays_of(space).costs.saved_bytes_one_repeat
    return one_repeat * bool(recomputes(space, techniques) or whole)


def least_usage(space: Space, techniques: Techniques, uncut: bool = False) -> float:
    """Bytes that every plan of the space needs at least: each decision at its smallest, and what
    only lives for a while likewise.

    uncut: as in `assemble`.
    """
    arrays = arrays_of(space)
    bytes_ = bytes_of(space, techniques, uncut)
    if uncut and uncut_up_to(space) < techniques.microbatches:
        bytes_ = np.where(
            arrays.costs.max_batch_pieces * space.parts < techniques.microbatches, np.inf, bytes_
        )
    return least_working(space, techniques, uncut) + float(
        np.minimum.reduceat(bytes_, arrays.first).sum()
    )


def least_working(space: Space, techniques: Techniques, uncut: bool = False) -> float:
    """Bytes that no plan can use for what it saves: what only lives for a while takes at least as
    much."""
    arrays, pieces = arrays_of(space), techniques.microbatches / space.parts if uncut else 1.0
    if has_uneven_stages(space):
        return 0.0
    work, epilogue = arrays.least_workspace[_weights_are_gathered(space, techniques)]
    # Bounds of policies of names ask under recompute=none, and hold where blocks are made again.
    again = replace(techniques, recompute="block")
    most = np.maximum.reduceat(_only_in_blocks(space, again, uncut), arrays.first)
    return temporary_bytes(work / pieces, epilogue / pieces, float(most.sum()))


def uncut_up_to(space: Space) -> float:
    """Microbatches up to which no split cuts the batch too finely."""
    return space.parts * arrays_of(space).least_pieces


def _written_out(space: Space, techniques: Techniques, copies: str) -> bool:
    """Whether plans may have their blocks written out, which copies nothing: these, or some
    recompute's whose least seconds are asked for."""
    return may_write_out(space, replace(techniques, recompute="none") if copies else techniques)


def may_write_out(space: Space, techniques: Techniques) -> bool:
    """Whether plans of these techniques may have their blocks written out."""
    pricer, kept = space.pricer, techniques.zero_stage < 3 and techniques.recompute == "none"
    return bool(kept and pricer.mesh.stages == 1 and pricer.writes_out(space.base))


def seconds_of(
    space: Space, techniques: Techniques, uncut: bool = False, copies: str = ""
) -> np.ndarray:
    """Seconds of every option of every variable in a row, as in `assemble`; +inf where the batch
    does not divide that far. copies: as much as plans of this recompute copy into stacks, those of
    the techniques where it is "". [options]"""
    arrays, micro = arrays_of(space), techniques.microbatches
    zero, costs, recompute = techniques.zero_stage, arrays.costs, recomputes(space, techniques)
    one_pass_s = arrays.pass_s + again_s(space, recompute) if recompute else arrays.pass_s
    shares, least = _stage_shares(space, techniques), max(micro, space.parts if uncut else 1)
    weights, written_out = (
        costs.grad_reduce_per_microbatch_s[zero],
        _written_out(space, techniques, copies),
    )
    if not written_out:
        weights = weights + costs.loop_copy_s[zero]
    if least > 1:
        weights = weights + costs.grad_accumulate_s[zero]
    times = space.parts if uncut else least
    copied = 0.0 if written_out else copied_s(space, copies or techniques.recompute)
    seconds: np.ndarray = arrays.count * (times * one_pass_s + least * weights) + times * copied
    if shares is not None:
        seconds = seconds * shares.passes
        if schedule := _apart(space, techniques):
            fewer = (schedule.ticks - schedule.weight_ticks) / micro
            seconds = seconds - fewer * times * arrays.count * costs.weights_apart_s
    per_step = costs.grad_reduce_per_step_s[zero]
    if written_out:
        per_step = per_step + costs.update_launch_s[zero]
    seconds = (seconds + arrays.count * per_step) * (shares.share if shares is not None else 1.0)
    if uncut and micro > space.parts:
        seconds = seconds + split_waits_s(space, techniques)
    if handed_s := handover_s(space, micro, techniques.schedule, techniques.virtual_stages):
        seconds[: space.variables[0].options] += handed_s  # every choice has one of these options
    return (
        np.where(arrays.costs.max_batch_pieces * space.parts < micro, np.inf, seconds)
        if uncut and uncut_up_to(space) < micro
        else seconds
    )


def waits_in_passes(space: Space) -> bool:
    """Whether anything waits for the host in every pass (`split_waits_s`)."""
    return bool(arrays_of(space).waits_s["none"].any())


def split_waits_s(space: Space, techniques: Techniques) -> np.ndarray:
    """Seconds that microbatches of the techniques, more than the space's, take beside those of the
    space at least: what waits for the host in each pass waits as long where a pass is small.
    [options]"""
    waits = arrays_of(space).waits_s
    again = techniques.recompute if techniques.recompute in waits else "none"
    extra_s: np.ndarray = max(0, techniques.microbatches - space.parts) * waits[again]
    if (shares := _stage_shares(space, techniques)) is None:
        return extra_s
    # Of gradients made apart the bubble's passes have none.
    return extra_s * shares.share * (1.0 if _apart(space, techniques) else shares.passes)


def bytes_of(space: Space, techniques: Techniques, uncut: bool = False) -> np.ndarray:
    """Bytes of state and saved activations of every option of every variable in a row, as in
    `assemble`. [options]"""
    state, saved = _state_and_saved(space, techniques, uncut)
    return state + saved


def _state_and_saved(
    space: Space, techniques: Techniques, uncut: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The two of `bytes_of`. [options] each"""
    arrays, shares = arrays_of(space), _stage_shares(space, techniques)
    costs, recompute = arrays.costs, recomputes(space, techniques)
    whole = takes_repeats_whole(space.base, space.pricer, techniques.zero_stage)
    one_repeat = _one_repeat(space, recompute) if recompute or whole else 0.0
    saved = (costs.saved_bytes_remat if recompute else costs.saved_bytes) + one_repeat
    if recompute == "block-keep":
        saved = saved + costs.saved_collective_bytes
    elif is_named(recompute):
        slack, policy = 1 + space.pricer.runtime.memory_slack, policy_costs(space, recompute)
        saved = saved + slack * (policy.saved_bytes + policy.on_way_bytes)
    zero, micro = techniques.zero_stage, techniques.microbatches
    state = arrays.state_bytes[zero] - outside_gradients(space, zero, micro)[0]
    state = (
        state + gathered_beside(space, zero, recompute or "none") + beside_sums(space, zero, micro)
    )
    if micro > 1:
        state = state + arrays.grad_accumulator_bytes[zero]
    if shares is not None:
        saved = shares.saved_microbatches * shares.held * (saved - one_repeat) + one_repeat
        if schedule := _apart(space, techniques):
            again = recompute and recompute != "block-keep"
            per_node = costs.handed_on_bytes_remat if again else costs.handed_on_bytes
            handed = arrays.count * per_node
            saved = saved + schedule.handed_in_flight * shares.held * handed
        copied = shares.copied_weights * arrays.block_grad_bytes[0]
        if techniques.schedule == DUALPIPE:  # weights of the stage as far from the other end
            recipe, gradients = space.pricer.recipe, costs.gradient_bytes[zero]
            both = 1 + recipe.parameter_bytes / recipe.gradient_bytes
            copied = copied + both * arrays.count * gradients
        state = shares.held * (state + copied)
    return state, saved * space.parts / techniques.microbatches if uncut else saved


@dataclass(frozen=True)
class _StageShares:
    """What a pipeline stage has of a space.

    share: what part of a variable's nodes a device runs [options]; held: what part of their weights
    and saved activations it holds, of the fullest stage [options]. passes: how often it runs them
    per microbatch [options]. links: both, of each link [links]. saved_microbatches: of how many it
    saves activations [options]. copied_weights: what part of the blocks' weights, as long as their
    gradients, is there twice [options].
    """

    share: np.ndarray
    held: np.ndarray
    passes: np.ndarray
    links: np.ndarray
    saved_microbatches: np.ndarray
    copied_weights: np.ndarray
    places: _Places


@dataclass(frozen=True)
class _Places:
    """Where variables and links are in the pipelines of a space, of any number of microbatches. One
    node stands for all that are dealt out alike."""

    nodes: list[int]
    of: np.ndarray  # [options] which of the nodes
    epilogue: np.ndarray  # [options] whether it follows the blocks
    inside_links: np.ndarray  # [links] whether both ends are in the blocks
    epilogue_links: np.ndarray  # [links] whether one follows them


def pipeline_in(space: Space, techniques: Techniques) -> Pipeline | None:
    """The pipeline of plans in a space, None where its mesh has no stages, or uneven ones."""
    if (stages := space.pricer.mesh.stages) < 2 or space.base.dealt is None:
        return None
    run, ending, twice = space.base.dealt
    return Pipeline(
        *run,
        stages,
        techniques.microbatches,
        techniques.schedule,
        ending,
        twice,
        techniques.virtual_stages,
    )


def has_uneven_stages(space: Space) -> bool:
    """Whether plans of the space have uneven pipeline stages
    (planner.execution.uneven_pipeline)."""
    return space.pricer.mesh.stages > 1 and space.base.dealt is None


def share_outside(space: Space) -> float:
    """What part of a node outside of the repeated blocks a device runs: all, or an equal part where
    stages are uneven, or share a framework's layers before the blocks."""
    if (stages := space.pricer.mesh.stages) < 2:
        return 1.0
    pipeline, framework = pipeline_in(space, Techniques()), space.pricer.runtime.kernels is not None
    equal = pipeline is None or (framework and share_layers_before(space.base, pipeline))
    return 1 / stages if equal else 1.0


def parts_of_stage(space: Space, techniques: Techniques) -> tuple[np.ndarray, np.ndarray]:
    """Per variable what part of its nodes a device runs in a microbatch, bubble included, and what
    part of what they save for one it has at once (without `uncut`)."""
    shares, firsts = _stage_shares(space, techniques), arrays_of(space).first
    return (
        ((shares.share * shares.passes)[firsts], (shares.held * shares.saved_microbatches)[firsts])
        if shares is not None
        else (np.ones(len(firsts)), np.ones(len(firsts)))
    )


def ticking(space: Space, techniques: Techniques) -> np.ndarray:
    """Seconds of what a pipeline stage runs in every tick, over all microbatches and without
    recomputation (space: as for `uncut`). [options]"""
    arrays, shares = arrays_of(space), _stage_shares(space, techniques)
    return (
        space.parts
        * arrays.count
        * arrays.pass_s
        * (shares.share * ~shares.places.epilogue if shares is not None else 0.0)
    )


def link_scale(space: Space, techniques: Techniques, *, ends: bool = True) -> list[float]:
    """Per link, what part of its conversions a device runs, times how often it does per microbatch;
    1 without pipeline stages.

    For any number of microbatches (0) what it is at least, as a part of the ticks. ends: what
    follows the blocks is counted.
    """
    shares = _stage_shares(space, techniques)
    if shares is None:
        return [1.0] * len(space.links)
    result: list[float] = (
        shares.links if ends else np.where(shares.places.epilogue_links, 0.0, shares.links)
    ).tolist()
    return result


def _apart(space: Space, techniques: Techniques) -> Schedule | None:
    """The schedule of plans whose gradients of weights are made apart from the backward pass, None
    of others."""
    pipeline = pipeline_in(space, techniques) if techniques.schedule == ZB_H1 else None
    return pipeline.microbatch_schedule if pipeline and techniques.microbatches else None


def slowdown(space: Space, techniques: Techniques) -> float:
    """How often a stage runs each of its blocks per microbatch, no more often than anything but
    what follows them; 1 without a pipeline."""
    stages, micro = space.pricer.mesh.stages, techniques.microbatches
    if stages < 2 or not micro or techniques.schedule == ZB_H1:  # which runs some no oftener
        return 1.0
    key = "slowdown", micro, techniques.schedule, techniques.virtual_stages
    if key not in space.memo:
        pipeline, passing = (
            pipeline_in(space, techniques),
            Schedule(stages, micro, techniques.schedule, techniques.virtual_stages),
        )
        space.memo[key] = (
            float(pipeline.forward_passes(pipeline.first) / micro)
            if pipeline is not None
            else passing.ticks / (micro * techniques.virtual_stages)
        )
    return float(space.memo[key])


def _only_in_blocks(space: Space, techniques: Techniques, uncut: bool = False) -> np.ndarray:
    """What of `bytes_of` is there for the blocks' backward pass alone
    (planner.space.liveness_points). [options]"""
    zero, micro = techniques.zero_stage, techniques.microbatches
    recompute = recomputes(space, techniques)
    again = takes_repeats_whole(space.base, space.pricer, zero) or recompute
    part = space.parts / micro if uncut else 1.0
    result = only_in_blocks(space, zero, micro, recompute or "none", part if again else 0.0)
    shares = _stage_shares(space, techniques)
    return result if shares is None else result * shares.share


def _stage_shares(space: Space, techniques: Techniques) -> _StageShares | None:
    if space.pricer.mesh.stages < 2:
        return None
    if has_uneven_stages(space):
        return _equal_shares(space, techniques)
    key = ("dealt", techniques.microbatches, techniques.schedule, techniques.virtual_stages)
    if key not in space.memo:
        pipeline = pipeline_in(space, techniques)
        assert pipeline is not None
        micro, places = techniques.microbatches, _places(space, pipeline)
        ratio = [float(pipeline.forward_passes(i) / micro) if micro else 1.0 for i in places.nodes]
        turns = [
            float(pipeline.forward_passes(i) / micro) if micro else least
            for i, least in ((-1, 1.0), (pipeline.first, 1.0), (pipeline.end, 1 / MOST_SLOWDOWN))
        ]
        links = (
            np.where(places.inside_links, float(pipeline.blocks_share), 1.0)
            * np.array(turns)[np.where(places.epilogue_links, 2, places.inside_links)]
        )
        copies = [
            float(pipeline.copied_weights_share) if i in pipeline.nodes else 0.0
            for i in places.nodes
        ]
        share, saved = (
            [float(f(i)) for i in places.nodes]
            for f in (pipeline.stage_share, pipeline.saved_microbatches)
        )
        held = share
        if space.pricer.runtime.kernels is not None:
            # Each stage runs and holds its own part alone, and the first, which has the most
            # microbatches in flight, nothing of what follows the blocks.
            copies = [0.0] * len(copies)
            waiting = in_flight(
                0, pipeline.stages, micro, pipeline.virtual_stages, techniques.schedule
            )
            waiting += techniques.schedule == DUALPIPE
            layers_before = share_outside(space) < 1
            saved = [
                max(1.0, waiting) * (layers_before or i in pipeline.nodes) for i in places.nodes
            ]
            if layers_before:
                share = [1 / pipeline.stages] * len(share)
            held = [
                part * (not pipeline.in_epilogue(i))
                for i, part in zip(places.nodes, share, strict=True)
            ]
        share_of, held_of, ratio_of, saved_of, copies_of = np.array(
            [share, held, ratio, saved, copies]
        )[:, places.of]
        space.memo[key] = _StageShares(
            share_of, held_of, ratio_of, links, saved_of, copies_of, places
        )
    result: _StageShares = space.memo[key]
    return result


def _equal_shares(space: Space, techniques: Techniques) -> _StageShares:
    """Uneven stages as if each took an equal part of every variable and link."""
    options, links = sum(v.options for v in space.variables), len(space.links)
    share, ratio = 1 / space.pricer.mesh.stages, slowdown(space, techniques)
    nowhere = _Places(
        [],
        np.zeros(options, np.int64),
        np.zeros(options, bool),
        np.zeros(links, bool),
        np.zeros(links, bool),
    )
    return _StageShares(
        np.full(options, share),
        np.full(options, share),
        np.full(options, ratio),
        np.full(links, share * ratio),
        np.ones(options),
        np.zeros(options),
        nowhere,
    )


def _places(space: Space, pipeline: Pipeline) -> _Places:
    if "places" not in space.memo:
        where = [_place(space, v, pipeline) for v in space.variables]
        blocks, epilogue = (
            np.array([i in pipeline.nodes for i in where]),
            np.array([pipeline.in_epilogue(i) for i in where]),
        )
        alike = [
            (inside, after, i in pipeline.shared_prologue)
            for i, inside, after in zip(where, blocks.tolist(), epilogue.tolist(), strict=True)
        ]
        kinds = list(dict.fromkeys(alike))
        sizes = [v.options for v in space.variables]
        a, b = np.array([(link.a, link.b) for link in space.links], np.int64).reshape(-1, 2).T
        space.memo["places"] = _Places(
            [where[alike.index(k)] for k in kinds],
            np.repeat([kinds.index(k) for k in alike], sizes),
            np.repeat(epilogue, sizes),
            blocks[a] & blocks[b],
            epilogue[a] | epilogue[b],
        )
    result: _Places = space.memo["places"]
    return result


def _place(space: Space, v: Variable, pipeline: Pipeline) -> int:
    """A node that a variable goes with: its own, or for a layout the maker's where its readers are
    in the blocks, else the first after or before them."""
    if v.kind == "op":
        return v.node
    graph = space.base.graph
    maker, readers = graph.producer.get(v.name, -1), [i for i, _ in graph.consumers[v.name]]
    blocks = [i for i in (maker, *readers) if i in pipeline.nodes]
    if blocks and (
        v.count > 1
        or (maker == blocks[0] != blocks[-1])
        or (
            v.kind == "weight"
            and len({(i - pipeline.first) // pipeline.period for i in readers}) == 1
        )
    ):
        return blocks[0]
    return (
        pipeline.end
        if (maker >= 0 and pipeline.in_epilogue(maker))
        or all(pipeline.in_epilogue(i) for i in readers)
        else -1
    )


def recomputed_link_shares(space: Space, techniques: Techniques) -> list[float]:
    """What part of each link's reshards runs again in the backward pass: all inside gated units;
    inside repeated blocks, where these recompute their collectives too, those of what the backward
    pass reads, directly or through other nodes. [links]"""
    base, graph = space.base, space.base.graph
    if has_uneven_stages(space):
        return [0.0] * len(space.links)
    named = is_named(techniques.recompute)
    if techniques.recompute != "block" and not named:
        return [float(link.name in base.gated.tensors) for link in space.links]
    inside = {i for first, period, _ in base.loops for i in range(first, first + period)}
    demand = policy_costs(space, techniques.recompute).demand if named else None
    recomputed = base.recomputed if demand is None else demand.recomputed

    def wanted(a: Variable, b: Variable) -> float:
        if not {a.kind, b.kind} <= {"op"} or not {a.node, b.node} <= inside:
            return 0.0
        readers = base.nodes_in_repeat[b.node]
        return sum(asks(a.node, reader) for reader in readers) / len(readers)

    def asks(maker: int, reader: int) -> bool:
        slots = reads(graph.nodes[reader], base.grad).slots
        makers = {
            slot: graph.producer.get(name, -1)
            for slot, name in enumerate(graph.nodes[reader].inputs)
        }
        return any(
            (reader in recomputed or slot in slots) and i in inside and base.shared[i] == maker
            for slot, i in makers.items()
        )

    return [
        wanted(space.variables[link.a], space.variables[link.b])
        if demand is None or link.name not in demand.saved_by_name
        else 0.0
        for link in space.links
    ]


def _weights_are_gathered(space: Space, techniques: Techniques) -> bool:
    """Whether workspaces are without weights: what is gathered of a block is counted with its
    state (planner.pricing.gradient_sync)."""
    return techniques.zero_stage == 3 and not space.base.written_out


def _workspaces_of(space: Space, techniques: Techniques) -> tuple[bool, bool]:
    """Whether workspaces are without weights, and whether what a repeat of a block has at once is
    counted apart (`SpaceArrays.workspace`)."""
    zero, recompute = techniques.zero_stage, techniques.recompute
    apart = repeat_is_apart(space.base, space.pricer, recompute, zero)
    return _weights_are_gathered(space, techniques), apart


def usage_of(
    space: Space, techniques: Techniques, choice: Sequence[int] | np.ndarray, uncut: bool = False
) -> tuple[float, float]:
    """(state and saved activations, what lives only for a while) of a choice, in bytes, as in
    `assemble` and planner.pricing.peak_memory."""
    arrays, zero, micro = arrays_of(space), techniques.zero_stage, techniques.microbatches
    chosen, pieces = arrays.first + np.asarray(choice), micro / space.parts if uncut else 1.0
    if has_uneven_stages(space):
        return (
            float(bytes_of(space, techniques, uncut)[chosen].sum()),
            float(arrays.workspace[_workspaces_of(space, techniques)][chosen].max(initial=0.0))
            / pieces,
        )
    if arrays.trained is not None:
        above = above_saved(space, zero, micro, np.asarray(choice), pieces, arrays.trained)
        return float(bytes_of(space, techniques, uncut)[chosen].sum()), above
    if not space.base.training:
        kept = float(bytes_of(space, techniques, uncut)[chosen].sum())
        return kept, forward_bytes(space, np.asarray(choice)) / pieces
    workspace = arrays.workspace[_workspaces_of(space, techniques)][chosen] / pieces
    follows, after = arrays.epilogue[chosen], float(arrays.costs.saved_bytes_epilogue[chosen].sum())
    state_and_saved, one_repeat = (
        _state_and_saved(space, techniques, uncut),
        _again(space, techniques)[chosen] / pieces,
    )
    state, saved = (float(x[chosen].sum()) for x in state_and_saved)
    above = workspace - gone_before(space, state_and_saved[1][chosen], one_repeat)[arrays.turn]
    return state + saved, temporary_bytes(
        float(above[~follows].max(initial=0.0)),
        after / pieces + float(workspace[follows].max(initial=0.0)),
        float(_only_in_blocks(space, techniques, uncut)[chosen].sum()),
        float(outside_gradients(space, zero, micro)[1][chosen].sum()) - saved,
    )


def _whole(values: np.ndarray) -> np.ndarray:
    return np.where(
        np.isfinite(values), np.rint(np.where(np.isfinite(values), values, 0)), FORBIDDEN
    ).astype(np.int64)
