"""Eight virtual CPU devices for every test that uses jax, set before jax is first imported; and no
cache of searches but what a test asks for."""

import gc
import os

# Flags of whoever runs the tests come later and count. LLVM spends a third of the tests' time on
# machine code that runs for milliseconds, and divides it for threads that other tests' workers
# need. XLA's newer emitters make an MLIR module of each fused kernel, the older one makes a loop:
# programs compile in a third of the time. Not --xla_cpu_use_fusion_emitters=false, which takes the
# emitter of scatters away, too: some programs compute wrong numbers (jaxlib 0.10.2: the speech
# model of tests/reader/test_control_flow.py, attention with a softcap). What tests start as a user
# would (tests/emit/test_emit.py, tests/launch) compiles as it does for users.
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
        *os.environ.get("XLA_FLAGS", "").split(),
        "--xla_force_host_platform_device_count=8",
    ]
)
os.environ.setdefault("NPROC", "256")  # threads: see planner.verify.worker.environment
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "float32")
os.environ["MESHWRIGHT_CACHE"] = "off"  # every test searches itself, whatever ran before it

os.environ["MESHWRIGHT_DEBUG"] = "1"  # what fails softly for users, the cache, fails here

import itertools

import pytest
from hypothesis import settings

# How long an example takes says more about the machine than about the code.
settings.register_profile("meshwright", deadline=None)
settings.load_profile("meshwright")

# Tracing makes and drops objects by the million, next to none of them in cycles: at Python's own
# thresholds a sixth of the tests' time is spent looking for some.
gc.set_threshold(50_000, 20, 20)


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of tests that are marked `one_in` all cases but one in so many are slow."""
    count: dict[str, itertools.count[int]] = {}
    for item in items:
        marker = item.get_closest_marker("one_in")
        if marker is None or item.get_closest_marker("slow"):
            continue
        place = next(count.setdefault(item.nodeid.partition("[")[0], itertools.count()))
        if place % marker.args[0]:
            item.add_marker(pytest.mark.slow)
