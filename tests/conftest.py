"""Eight emulated CPU devices, strict shapes, and caches that belong to the test session."""

import importlib.metadata
import os
import signal
import tempfile

os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_force_host_platform_device_count=8",
        # Programs of a test run for milliseconds and compile for seconds: optimizing them less cuts that to a sixth.
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        # XLA aborts at a flag that it does not know, and this one is not there to stay.
        *(["--xla_cpu_use_fusion_emitters=false"] if importlib.metadata.version("jax").startswith("0.10.") else []),
        os.environ.get("XLA_FLAGS", ""),  # of two values of a flag, the last counts
    ]
)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["DYNRL_CACHE"] = tempfile.mkdtemp(prefix="dynrl_test_cache_")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a session in a script's background; its children inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)

import jax
import pytest
from tiny import tiny_mapping

from dynrl.config import MeshConfig, from_mapping
from dynrl.models.sharding import make_mesh

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session")
def mesh1():
    """One device."""
    return make_mesh(MeshConfig(), jax.devices()[:1])


@pytest.fixture(scope="session")
def mesh8():
    """Eight devices, all on the data axis."""
    return make_mesh(MeshConfig(), jax.devices())


@pytest.fixture(scope="session")
def mesh222():
    """Two devices on each axis."""
    return make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), jax.devices())


@pytest.fixture(scope="session")
def tiny_config():
    """A function that makes a tiny RunConfig from overrides."""
    return lambda **overrides: from_mapping(tiny_mapping(**overrides))


@pytest.fixture(scope="module")
def quick_compiles():
    """For files that make whole runs, whose programs are compiled more often than they run."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
