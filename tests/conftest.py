"""Eight virtual CPU devices for every test that uses jax, set before jax is first imported; and no
cache of searches but what a test asks for."""

import os

# Flags of whoever runs the tests stay.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
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
