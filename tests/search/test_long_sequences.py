"""Long sequences: positions are cut beside heads where a step has fewer rows than devices."""

from __future__ import annotations

import pytest

import planner
from planner.machine.mesh_choices import for_long_sequences
from planner.machine.topology import for_devices


def test_meshes_cut_the_batch_as_widely_as_it_has_rows() -> None:
    machine = for_devices("h100-sxm", 128)
    found = [m.shape for m in for_long_sequences(machine, 1, 8)]
    assert found[:3] == [
        (("data", 8), ("sequence", 2), ("tensor", 8)),
        (("data", 4), ("sequence", 4), ("tensor", 8)),
        (("data", 2), ("sequence", 8), ("tensor", 8)),
    ]
    assert all(dict(shape)["tensor"] == 4 for shape in found[3:])
    assert for_long_sequences(machine, 2, 1)[0].shape == (
        ("stage", 2),
        ("sequence", 8),
        ("tensor", 8),
    )
    assert for_long_sequences(for_devices("h100-sxm", 1), 1, 8) == ()


@pytest.mark.slow
def test_a_ring_beside_heads_is_found_where_memory_binds() -> None:
    """Half a million tokens leave no room for plans of two axes without stages, which such meshes
    were otherwise looked for around."""
    steps = [
        planner.plan(
            "zoo:llama3-8b,seq=524288",
            devices=128,
            batch=8,
            hardware="h100-sxm",
            baselines=False,
            pins=pins,
        ).costs["step_time_s"]
        for pins in (None, "sequence=4,tp=8,dp=4")
    ]
    assert steps[0] <= 1.005 * steps[1]
