"""What a ResNet's convolutions and the element-wise work between them take on an H100."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from costmodels.precision import load_recipe
from costmodels.products import Product, product_time_s
from costmodels.runtimes import load_runtime
from planner.analysis.facts import GraphFacts
from planner.machine.mesh_choices import pinned_mesh
from planner.machine.topology import for_devices
from planner.pricing.kernels import kernel_times, local_bytes
from planner.pricing.pricer import Pricer
from planner.sharding.rule import Split
from planner.verify.hlo.kernels import kernels
from planner.verify.hlo.text import parse
from planner.verify.timing import kernel_s
from planner.workload.model import Model, Workload

WHOLE = Split()
FILTER = """
ENTRY %main (x: bf16[128,28,28,128], g: bf16[128,28,28,128]) -> bf16[128,3,3,128] {
  %x = bf16[128,28,28,128]{3,2,1,0} parameter(0)
  %g = bf16[128,28,28,128]{3,2,1,0} parameter(1)
  %conv = (bf16[128,3,3,128]{3,2,1,0}, u8[0]{0}) custom-call(%x, %g), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardFilter"
  ROOT %made = bf16[128,3,3,128]{3,2,1,0} get-tuple-element(%conv), index=0
}
"""


def pricer() -> Pricer:
    topology = for_devices("h100-sxm", 1)
    mesh = pinned_mesh(topology, {})
    return Pricer(topology, mesh, load_runtime("jax-shard_map"), load_recipe("bf16-mixed"))


@cache
def resnet() -> GraphFacts:
    model = Model.open("zoo:resnet50", Workload(batch=128))
    return GraphFacts.of(model.graph(1), training=True)


def index(name: str) -> int:
    return next(i for i, node in enumerate(resnet().graph.nodes) if node.id == name)


def test_what_begins_a_turn_of_a_loop_reads_what_the_turn_before_wrote() -> None:
    """Compiled for an H100 the ReLU of layer 2 that begins its blocks moves two arrays of 103 MB;
    the one behind a block's first convolution is part of the kernel before it."""
    base, own = resnet(), pricer()
    begins, inside = index("/layer2/0/Relu"), index("/layer2/1/conv1/Relu")
    assert base.begins_turns == {index(f"/layer{k}/0/Relu") for k in (1, 2, 3, 4)}
    read, written = local_bytes(base, begins, WHOLE, own)
    assert read == written == 128 * 512 * 28 * 28 * 2
    forward, backward = kernel_times(base, begins, WHOLE, own)
    assert forward == own.kernel_s(0.0, read + written, "bfloat16")
    assert backward == 2 * forward
    fused = own.runtime.fused_traffic * local_bytes(base, inside, WHOLE, own)[1]
    assert kernel_times(base, inside, WHOLE, own)[0] == own.kernel_s(0.0, fused, "bfloat16")


def test_convolutions_are_priced_at_their_share_of_the_rate_of_products() -> None:
    base, own = resnet(), pricer()
    i = index("/layer2/1/conv2/Conv")
    tiles = own.device.tiles
    assert tiles is not None and tiles.convolutions < 1
    product = Product(*(np.array([float(x)]) for x in (128 * 28 * 28, 128, 9 * 128, 1)))
    size = np.array([float(sum(local_bytes(base, i, WHOLE, own)))])
    both = [
        float(product_time_s(own.device, each, size, "bfloat16")[0])
        for each in (product, product.of_left, product.of_right)
    ]
    forward, backward = kernel_times(base, i, WHOLE, own)
    assert forward == pytest.approx(both[0] / tiles.convolutions)
    assert backward == pytest.approx((both[1] + both[2]) / tiles.convolutions)


def test_the_clock_lets_a_gradient_of_a_filter_cut_its_sums() -> None:
    """cuDNN's kernel adds up 100,352 places for 128 x 1,152 results; uncut, nine tiles would take
    ten times as long."""
    (site,) = kernels(parse(FILTER))
    device, kernel = pricer().device, site.selected
    extents = (1152, 128, 100352, 1)
    assert kernel.convolution and kernel.extents == extents
    product = Product(*(np.array([x]) for x in extents), convolution=True)
    size = np.array([float(kernel.moved_bytes)])
    assert kernel_s(kernel, device) == product_time_s(device, product, size, "bfloat16")[0]
    assert kernel_s(kernel, device) < 1e-4
