"""What a price is made of: the kernels written down are those of the price, and every constant is
where it is said to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from costmodels.hardware.device import DEVICES
from costmodels.precision import load_recipe
from costmodels.runtimes import FOLDER, load_runtime
from planner.analysis.facts import GraphFacts
from planner.cli import main
from planner.machine.mesh_choices import pinned_mesh
from planner.machine.topology import for_devices
from planner.pricing.kernels import kernel_times
from planner.pricing.pricer import Pricer
from planner.pricing.terms import Terms, constants, terms_of
from planner.sharding.rule import Split
from planner.workload.model import Model, Workload

SPECS = ["zoo:llama-tiny", "zoo:bert-tiny", "zoo:resnet-tiny", "zoo:mixtral-tiny", "zoo:t5-tiny"]


def pricer_on(hardware: str, precision: str = "bf16-mixed") -> Pricer:
    topology = for_devices(hardware, 16)
    mesh = pinned_mesh(topology, {"data": 16})
    return Pricer(topology, mesh, load_runtime("jax-shard_map"), load_recipe(precision))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    ("hardware", "precision"), [("h100-sxm", "bf16-mixed"), ("h100-sxm", "fp8"), ("a100", "fp32")]
)
def test_terms_are_those_of_the_price(spec: str, hardware: str, precision: str) -> None:
    """Seconds of the kernels written down make the forward pass, or both passes where the backward
    pass asks for kernels of its own."""
    base = GraphFacts.of(Model.open(spec, Workload(batch=16)).graph(1), training=True)
    pricer = pricer_on(hardware, precision)
    for i in range(len(base.graph.nodes)):
        found = terms_of(base, i, Split(), pricer)
        forward, backward = kernel_times(base, i, Split(), pricer)
        assert (found.forward_s, found.backward_s) == (forward, backward)
        if base.graph.nodes[i].bodies:
            continue
        noted = sum(k.often * k.seconds for k in found.kernels)
        assert noted == pytest.approx(forward) or noted >= (forward + backward) * (1 - 1e-9)


def test_constants_are_where_they_are_said_to_be() -> None:
    base = GraphFacts.of(Model.open("zoo:llama-tiny", Workload(batch=16)).graph(1), training=True)
    pricer = pricer_on("h100-sxm")
    every = [
        k for i in range(len(base.graph.nodes)) for k in terms_of(base, i, Split(), pricer).kernels
    ]
    found = constants(pricer, every, ["data"])
    assert {c.name for c in found} >= {
        "peak.bfloat16",
        "matmul.efficiency",
        "attention.forward",
        "memory.bandwidth",
        "kernel.launch",
        "inner.bandwidth",
        "outer.latency",
        "per_device.gpu.stragglers",
    }
    for constant in found:
        name, line = constant.place.split(":")
        path = next(p for p in (DEVICES / name, FOLDER / name) if p.is_file())
        text = path.read_text().splitlines()[int(line) - 1]
        assert text.startswith(constant.name.rpartition(".")[2])
        assert constant.value in text.replace('"', "")
        assert constant.source, constant.name


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "p.json")
    assert main(["zoo:llama-tiny", "--devices", "16", "--batch", "64", "--quiet", "-o", path]) == 0
    capsys.readouterr()
    assert main(["explain", path, "q_proj", "--price"]) == 0
    said = capsys.readouterr().out
    for part in (
        "price of its kernels",
        "TFLOP/s",
        "h100-sxm.toml:",
        "what such a price was worth",
    ):
        assert part in said
    assert main(["explain", path, "Reshape", "--price"]) == 0
    assert "no kernel: it is a view" in capsys.readouterr().out
    assert main(["explain", path, "--price"]) == 2
    assert "P003" in capsys.readouterr().err


def attention_of(workload: str) -> tuple[Terms, Pricer]:
    """The terms of the first attention of GPT-2 small on an H100."""
    training = workload == "train"
    model = Model.open("zoo:gpt2-small", Workload(workload, batch=8))
    base, pricer = GraphFacts.of(model.graph(1), training=training), pricer_on("h100-sxm")
    i = next(i for i, n in enumerate(base.graph.nodes) if n.op == "Attention")
    return terms_of(base, i, Split(), pricer), pricer


def test_attention_is_what_its_row_says_and_what_it_moves_beside() -> None:
    """6 of 20 microseconds were in no figure that was shown."""
    found, pricer = attention_of("train")
    assert [k.attention.backward for k in found.kernels if k.attention] == [False, True]
    assert pricer.device.attention is not None
    for k in found.kernels:
        assert k.attention is not None
        rate = pricer.device.peak(k.dtype) * pricer.device.attention.efficiency(k.attention)
        moved = k.moved_bytes / (pricer.device.memory_bytes_per_s * pricer.device.memory_efficiency)
        beside = pricer.device.attention.passes[k.attention.backward]
        assert k.seconds == pytest.approx(k.flops / rate + beside * moved)
    assert "attention.passes" in {c.name for c in found.constants}


def test_a_forward_pass_has_no_kernels_of_a_backward_pass() -> None:
    found, _ = attention_of("infer")
    assert [k.attention.backward for k in found.kernels if k.attention] == [False]
    assert "attention.backward" not in {c.name for c in found.constants}
    assert sum(k.often * k.seconds for k in found.kernels) == pytest.approx(found.forward_s)


@pytest.mark.parametrize(
    ("workload", "said"),
    [("train", "forward 0.6 times, backward 2.3 times"), ("infer", "forward 0.6 times\n")],
)
def test_the_command_says_what_attention_moves(
    workload: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "p.json")
    machine = ["--devices", "2", "--batch", "8", "--workload", workload]
    assert main(["zoo:gpt2-small", *machine, "--quiet", "-o", path]) == 0
    assert main(["explain", path, "h.0/attn/Attention", "--price"]) == 0
    assert f"attention takes its arithmetic and what it moves: {said}" in capsys.readouterr().out


@pytest.mark.slow
def test_what_the_kernel_before_does_is_no_view(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On TPUs an activation takes no time of its own; a Reshape is a view on any device."""
    path = str(tmp_path / "p.json")
    machine = ["--devices", "4", "--batch", "8", "--hardware", "v5e"]
    assert main(["zoo:gpt2-small", *machine, "--quiet", "-o", path]) == 0
    for node, why in (
        ("h.0/mlp/Gelu", "the kernel before it does its work"),
        ("Reshape", "it is a view"),
    ):
        capsys.readouterr()
        assert main(["explain", path, node, "--price"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert f"no kernel: {why}" in said
        assert f"bound by nothing: {why}" in said
