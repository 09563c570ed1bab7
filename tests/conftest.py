"""Eight emulated CPU devices, strict shapes, and caches that belong to the test session."""

import os
import tempfile

import jax

# Programs of a test run for milliseconds and compile for seconds: optimizing them less cuts that to a sixth.
_FLAGS = [
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
]
if jax.__version_info__ < (0, 11):  # XLA aborts at a flag it does not know
    _FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([*_FLAGS, os.environ.get("XLA_FLAGS", "")])  # of two values, the last counts
os.environ["JAX_PLATFORMS"] = "cpu"
jax.config.update("jax_platforms", "cpu")  # jax has read the environment by now
os.environ["DYNRL_CACHE"] = tempfile.mkdtemp(prefix="dynrl_test_cache_")

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
