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

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from costmodels.liveness import temporary_bytes
from planner.execution.save_policies import is_named
from planner.execution.techniques import DUALPIPE
from planner.ops.residuals import reads
from planner.pricing.saved_activations import repeat_is_apart, takes_repeats_whole
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
from planner.space.stage_shares import (
    has_uneven_stages,
    link_scale,
    stage_shares,
    weights_apart_schedule,
)
from planner.space.techniques import Techniques
from planner.space.variables import Space, Variable

PICO = 1e12


def assemble(
    space: Space,
    techniques: Techniques,
    limit_bytes: float | None,
    *,
    uncut: bool = False,
    unit_s: float = 1 / PICO,
    liveness: bool = False,
) -> Problem:
    """The problem in integers: `unit_s` (picoseconds) and bytes; impossible reshards are
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
    shares, least = stage_shares(space, techniques), max(micro, space.parts if uncut else 1)
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
        if schedule := weights_apart_schedule(space, techniques):
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
    if (shares := stage_shares(space, techniques)) is None:
        return extra_s
    # Of gradients made apart the bubble's passes have none.
    return (
        extra_s
        * shares.share
        * (1.0 if weights_apart_schedule(space, techniques) else shares.passes)
    )


def bytes_of(space: Space, techniques: Techniques, uncut: bool = False) -> np.ndarray:
    """Bytes of state and saved activations of every option of every variable in a row, as in
    `assemble`. [options]"""
    state, saved = _state_and_saved(space, techniques, uncut)
    return state + saved


def _state_and_saved(
    space: Space, techniques: Techniques, uncut: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The two of `bytes_of`. [options] each"""
    arrays, shares = arrays_of(space), stage_shares(space, techniques)
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
        saved = shares.saved_microbatches * shares.stored * (saved - one_repeat) + one_repeat
        if schedule := weights_apart_schedule(space, techniques):
            again = recompute and recompute != "block-keep"
            per_node = costs.handed_on_bytes_remat if again else costs.handed_on_bytes
            handed = arrays.count * per_node
            saved = saved + schedule.handed_in_flight * shares.stored * handed
        copied = shares.copied_weights * arrays.block_grad_bytes[0]
        if techniques.schedule == DUALPIPE:  # weights of the stage as far from the other end
            recipe, gradients = space.pricer.recipe, costs.gradient_bytes[zero]
            both = 1 + recipe.parameter_bytes / recipe.gradient_bytes
            copied = copied + both * arrays.count * gradients
        state = shares.stored * (state + copied)
    return state, saved * space.parts / techniques.microbatches if uncut else saved


def _only_in_blocks(space: Space, techniques: Techniques, uncut: bool = False) -> np.ndarray:
    """What of `bytes_of` is there for the blocks' backward pass alone
    (planner.space.liveness_points). [options]"""
    zero, micro = techniques.zero_stage, techniques.microbatches
    recompute = recomputes(space, techniques)
    again = takes_repeats_whole(space.base, space.pricer, zero) or recompute
    part = space.parts / micro if uncut else 1.0
    result = only_in_blocks(space, zero, micro, recompute or "none", part if again else 0.0)
    shares = stage_shares(space, techniques)
    return result if shares is None else result * shares.share


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
