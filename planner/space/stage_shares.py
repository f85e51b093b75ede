"""What a pipeline stage has of a space: what part of each variable's nodes a device runs, how often
in a microbatch, and what part of their weights and saved activations it stores.

The bounds and the problem of a space (planner.space.assemble) multiply their seconds and bytes by
these; without pipeline stages there are none, and everything counts once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from costmodels.frameworks.peak_memory import in_flight
from planner.execution.pipeline import Pipeline, Schedule
from planner.execution.techniques import DUALPIPE, ZB_H1
from planner.pricing.frameworks.stages import share_layers_before
from planner.space.option_arrays import arrays_of
from planner.space.techniques import Techniques
from planner.space.variables import Space, Variable

MOST_SLOWDOWN = 2.0
"""Ticks per microbatch of the shortest pipelines that are searched: at least stages - 1
microbatches."""


@dataclass(frozen=True)
class StageShares:
    """What a pipeline stage has of a space.

    share: what part of a variable's nodes a device runs [options]; stored: what part of their
    weights and saved activations it stores, of the fullest stage [options]. passes: how often it
    runs them per microbatch [options]. links: both, of each link [links]. saved_microbatches: of
    how many it saves activations [options]. copied_weights: what part of the blocks' weights, as
    long as their gradients, is there twice [options].
    """

    share: np.ndarray
    stored: np.ndarray
    passes: np.ndarray
    links: np.ndarray
    saved_microbatches: np.ndarray
    copied_weights: np.ndarray
    places: Places


@dataclass(frozen=True)
class Places:
    """Where variables and links are in the pipelines of a space, of any number of microbatches. One
    node stands for all that are on the stages alike."""

    nodes: list[int]
    of: np.ndarray  # [options] which of the nodes
    epilogue: np.ndarray  # [options] whether it follows the blocks
    inside_links: np.ndarray  # [links] whether both ends are in the blocks
    epilogue_links: np.ndarray  # [links] whether one follows them


def pipeline_in(space: Space, techniques: Techniques) -> Pipeline | None:
    """The pipeline of plans in a space, None where its mesh has no stages, or uneven ones."""
    if (stages := space.pricer.mesh.stages) < 2 or space.base.dealt is None:
        return None
    (first, period, repeats), early_epilogue, shared_prologue = space.base.dealt
    return Pipeline(
        first=first,
        period=period,
        repeats=repeats,
        stages=stages,
        microbatches=techniques.microbatches,
        schedule=techniques.schedule,
        early_epilogue=early_epilogue,
        shared_prologue=shared_prologue,
        virtual_stages=techniques.virtual_stages,
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
    shares, firsts = stage_shares(space, techniques), arrays_of(space).first
    return (
        (
            (shares.share * shares.passes)[firsts],
            (shares.stored * shares.saved_microbatches)[firsts],
        )
        if shares is not None
        else (np.ones(len(firsts)), np.ones(len(firsts)))
    )


def ticking(space: Space, techniques: Techniques) -> np.ndarray:
    """Seconds of what a pipeline stage runs in every tick, over all microbatches and without
    recomputation (space: as for `uncut`). [options]"""
    arrays, shares = arrays_of(space), stage_shares(space, techniques)
    return (
        space.parts
        * arrays.count
        * arrays.pass_s
        * (shares.share * ~shares.places.epilogue if shares is not None else 0.0)
    )


def link_scale(space: Space, techniques: Techniques, *, ends: bool = True) -> list[float]:
    """Per link, what part of its reshards a device runs, times how often it does per microbatch;
    1 without pipeline stages.

    For any number of microbatches (0) what it is at least, as a part of the ticks. ends: what
    follows the blocks is counted.
    """
    shares = stage_shares(space, techniques)
    if shares is None:
        return [1.0] * len(space.links)
    result: list[float] = (
        shares.links if ends else np.where(shares.places.epilogue_links, 0.0, shares.links)
    ).tolist()
    return result


def weights_apart_schedule(space: Space, techniques: Techniques) -> Schedule | None:
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
        pipeline, schedule = (
            pipeline_in(space, techniques),
            Schedule(stages, micro, techniques.schedule, techniques.virtual_stages),
        )
        space.memo[key] = (
            float(pipeline.forward_passes(pipeline.first) / micro)
            if pipeline is not None
            else schedule.ticks / (micro * techniques.virtual_stages)
        )
    return float(space.memo[key])


def stage_shares(space: Space, techniques: Techniques) -> StageShares | None:
    """The shares of a space's pipeline stages under these techniques, kept in its memo; None where
    its mesh has no stages."""
    if space.pricer.mesh.stages < 2:
        return None
    if has_uneven_stages(space):
        return _equal_shares(space, techniques)
    key = "stage shares", techniques.microbatches, techniques.schedule, techniques.virtual_stages
    if key not in space.memo:
        pipeline = pipeline_in(space, techniques)
        assert pipeline is not None
        space.memo[key] = _shares_of_pipeline(space, pipeline)
    result: StageShares = space.memo[key]
    return result


def _shares_of_pipeline(space: Space, pipeline: Pipeline) -> StageShares:
    micro, places = pipeline.microbatches, _places(space, pipeline)
    passes = [float(pipeline.forward_passes(i) / micro) if micro else 1.0 for i in places.nodes]
    passes_of_links = [  # before the blocks, in them, and behind them
        float(pipeline.forward_passes(i) / micro) if micro else least
        for i, least in ((-1, 1.0), (pipeline.first, 1.0), (pipeline.end, 1 / MOST_SLOWDOWN))
    ]
    links = (
        np.where(places.inside_links, float(pipeline.blocks_share), 1.0)
        * np.array(passes_of_links)[np.where(places.epilogue_links, 2, places.inside_links)]
    )
    copied = [
        float(pipeline.copied_weights_share) if i in pipeline.nodes else 0.0 for i in places.nodes
    ]
    share, saved = (
        [float(f(i)) for i in places.nodes]
        for f in (pipeline.stage_share, pipeline.saved_microbatches)
    )
    stored = share
    if space.pricer.runtime.kernels is not None:
        # Each stage of a framework runs and stores its own part alone, and the first, which has the
        # most microbatches in flight, nothing of what follows the blocks.
        copied = [0.0] * len(copied)
        most_in_flight = in_flight(
            0, pipeline.stages, micro, pipeline.virtual_stages, pipeline.schedule
        )
        most_in_flight += pipeline.schedule == DUALPIPE
        layers_before = share_outside(space) < 1
        saved = [
            max(1.0, most_in_flight) * (layers_before or i in pipeline.nodes) for i in places.nodes
        ]
        if layers_before:
            share = [1 / pipeline.stages] * len(share)
        stored = [
            part * (not pipeline.in_epilogue(i))
            for i, part in zip(places.nodes, share, strict=True)
        ]
    share_of, stored_of, passes_of, saved_of, copied_of = np.array(
        [share, stored, passes, saved, copied]
    )[:, places.of]
    return StageShares(
        share=share_of,
        stored=stored_of,
        passes=passes_of,
        links=links,
        saved_microbatches=saved_of,
        copied_weights=copied_of,
        places=places,
    )


def _equal_shares(space: Space, techniques: Techniques) -> StageShares:
    """Uneven stages as if each took an equal part of every variable and link."""
    options, links = sum(v.options for v in space.variables), len(space.links)
    share, passes = 1 / space.pricer.mesh.stages, slowdown(space, techniques)
    nowhere = Places(
        nodes=[],
        of=np.zeros(options, np.int64),
        epilogue=np.zeros(options, bool),
        inside_links=np.zeros(links, bool),
        epilogue_links=np.zeros(links, bool),
    )
    return StageShares(
        share=np.full(options, share),
        stored=np.full(options, share),
        passes=np.full(options, passes),
        links=np.full(links, share * passes),
        saved_microbatches=np.ones(options),
        copied_weights=np.zeros(options),
        places=nowhere,
    )


def _places(space: Space, pipeline: Pipeline) -> Places:
    if "places" not in space.memo:
        node_of = [_place(space, v, pipeline) for v in space.variables]
        blocks, epilogue = (
            np.array([i in pipeline.nodes for i in node_of]),
            np.array([pipeline.in_epilogue(i) for i in node_of]),
        )
        roles = [
            (inside, in_epilogue, i in pipeline.shared_prologue)
            for i, inside, in_epilogue in zip(
                node_of, blocks.tolist(), epilogue.tolist(), strict=True
            )
        ]
        kinds = list(dict.fromkeys(roles))
        sizes = [v.options for v in space.variables]
        a, b = np.array([(link.a, link.b) for link in space.links], np.int64).reshape(-1, 2).T
        space.memo["places"] = Places(
            nodes=[node_of[roles.index(k)] for k in kinds],
            of=np.repeat([kinds.index(k) for k in roles], sizes),
            epilogue=np.repeat(epilogue, sizes),
            inside_links=blocks[a] & blocks[b],
            epilogue_links=epilogue[a] | epilogue[b],
        )
    result: Places = space.memo["places"]
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
