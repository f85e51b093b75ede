"""Eight virtual CPU devices for every test that uses jax, set before jax is first imported; and no
cache of searches but what a test asks for."""

import gc
import os

# Flags of whoever runs the tests come later and count. Making good machine code takes half of the
# tests' time, and the code runs for milliseconds: LLVM optimises little, and fusions are written by
# XLA's plain emitter, which joins fewer copies. Collectives stay the same ones, and a peak of
# 1.5 MB moved by 0.04 % (a GPT's step on 2 x 2 x 2 devices).
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_use_fusion_emitters=false",
        *os.environ.get("XLA_FLAGS", "").split(),
        "--xla_force_host_platform_device_count=8",
    ]
)
os.environ.setdefault("NPROC", "256")  # threads: see planner.verify.worker.environment
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "float32")
os.environ["MESHWRIGHT_CACHE"] = "off"  # every test searches itself, whatever ran before it

os.environ["MESHWRIGHT_DEBUG"] = "1"  # what fails softly for users, the cache, fails here

from hypothesis import settings

# How long an example takes says more about the machine than about the code.
settings.register_profile("meshwright", deadline=None)
settings.load_profile("meshwright")

# Tracing makes and drops objects by the million, next to none of them in cycles: at Python's own
# thresholds a sixth of the tests' time is spent looking for some.
gc.set_threshold(50_000, 20, 20)
