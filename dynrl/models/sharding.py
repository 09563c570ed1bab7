"""The device mesh, and which axis of every array lies on which axis of it.

Parameters are matched by name, so that the same rules place parameters, gradients and optimizer moments. An array
dimension that its mesh axis does not divide is replicated.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dynrl.config import ConfigError, MeshConfig
from dynrl.types import Array

ROWS = ("data", "fsdp")  # groups and rollouts are split over both

# (module, leaf) -> logical axes of the array's last dimensions. Leading dimensions (scanned layers) are replicated.
PARAM_AXES: dict[tuple[str, str], tuple[str | None, ...]] = {
    ("", "embedding"): ("vocab", "embed"),
    ("", "unembedding"): ("embed", "vocab"),
    **{(name, "kernel"): ("embed", "heads") for name in "qkv"},
    **{(name, "bias"): ("heads",) for name in "qkv"},
    ("o", "kernel"): ("heads", "embed"),
    ("gate", "kernel"): ("embed", "mlp"),
    ("up", "kernel"): ("embed", "mlp"),
    ("down", "kernel"): ("mlp", "embed"),
}
RULES = {"vocab": "tensor", "heads": "tensor", "mlp": "tensor", "embed": "fsdp"}

_CHUNK = 1 << 16  # bytes that are sent at once


def make_mesh(config: MeshConfig, devices: list[Any] | None = None) -> Mesh:
    """A (data, fsdp, tensor) mesh over all devices of all processes.

    Raises:
      ConfigError: when the axes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    inner = config.fsdp * config.tensor
    data = config.data or len(devices) // inner
    if data * inner != len(devices) or data == 0:
        raise ConfigError(
            f"config.mesh: data {config.data} x fsdp {config.fsdp} x tensor {config.tensor} does not give the "
            f"{len(devices)} devices there are; data = 0 takes what fsdp x tensor leaves"
        )
    shape = (data, config.fsdp, config.tensor)
    return jax.make_mesh(shape, ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3, devices=devices)


def split_meshes(config: MeshConfig, sampler_devices: int) -> tuple[Mesh, Mesh]:
    """Meshes to train and to sample on: the same one, or the last `sampler_devices` devices apart for sampling.

    Raises:
      ConfigError: when a mesh does not fit its devices, or the devices are those of several processes.
    """
    if not sampler_devices:
        mesh = make_mesh(config)
        return mesh, mesh
    devices = jax.devices()
    if jax.process_count() > 1 or sampler_devices >= len(devices):
        raise ConfigError(
            f"config.schedule.sampler_devices: {sampler_devices} of {len(devices)} devices of {jax.process_count()} "
            "processes: devices can be set apart within one process, and must leave one to train on"
        )
    tensor = config.tensor if sampler_devices % config.tensor == 0 else 1
    return make_mesh(config, devices[:-sampler_devices]), make_mesh(
        MeshConfig(tensor=tensor), devices[-sampler_devices:]
    )


def num_row_shards(mesh: Mesh) -> int:
    """Over how many shards groups and rollouts are split."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def rows(mesh: Mesh) -> NamedSharding:
    """The leading axis is split over the row shards."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def kv_heads(mesh: Mesh, num_kv_heads: int) -> NamedSharding:
    """For [rows, kv_heads, length, head_dim]: rows split, heads split over `tensor` where it divides them."""
    tensor = "tensor" if num_kv_heads % mesh.shape["tensor"] == 0 else None
    return NamedSharding(mesh, PartitionSpec(ROWS, tensor))


def param_shardings(tree: Any, mesh: Mesh) -> Any:
    """A tree of NamedSharding for parameters, or for anything shaped by parameter names (optimizer state)."""

    def one(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        names = [str(getattr(k, "key", getattr(k, "name", ""))) for k in path]
        leaf_name, module = names[-1] if names else "", names[-2] if len(names) > 1 else ""
        axes = PARAM_AXES.get((module, leaf_name)) or PARAM_AXES.get(("", leaf_name)) or ()
        shape = np.shape(leaf)
        if len(shape) < len(axes):
            axes = ()
        spec: list[str | None] = [None] * (len(shape) - len(axes))
        for size, axis in zip(shape[len(shape) - len(axes) :], axes, strict=True):
            target = RULES.get(axis or "")
            spec.append(target if target and size % mesh.shape[target] == 0 else None)
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(one, tree)


def place(value: Any, sharding: NamedSharding) -> Array:
    """A host value as a global array, without a compile or a collective.

    Every process holds it in full, or at least what the sharding puts on the process's devices.
    """
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def local_rows(array: Array) -> np.ndarray:
    """This process's rows of a row-sharded array on the host; rows of other processes hold zeros."""
    if array.is_fully_addressable:
        return np.asarray(array)
    out = np.zeros(array.shape, array.dtype)
    for shard in array.addressable_shards:
        out[shard.index] = np.asarray(shard.data)
    return out


def owned_rows(mesh: Mesh, num_rows: int) -> np.ndarray:
    """Bool [num_rows]: which leading rows of a row-sharded array this process judges, each row on one process."""
    owned = np.zeros(num_rows, bool)
    owner_of: dict[tuple[int, int], int] = {}
    for device, index in rows(mesh).devices_indices_map((num_rows,)).items():
        start, stop, _ = index[0].indices(num_rows)
        span = (start, stop)
        process = int(device.process_index or 0)
        owner_of[span] = min(owner_of.get(span, process), process)
    for (start, stop), process in owner_of.items():
        owned[start:stop] = process == jax.process_index()
    return owned


def own_shards(mesh: Mesh) -> frozenset[int]:
    """Row shards that lie on this process's devices, perhaps on those of others too."""
    shards = num_row_shards(mesh)
    indices = rows(mesh).addressable_devices_indices_map((shards,)).values()
    return frozenset(index[0].indices(shards)[0] for index in indices if index is not None)


def any_process(flag: bool) -> bool:
    """Whether the flag is set on any process, the same answer on all (law 4). Every process must call it."""
    if jax.process_count() == 1:
        return flag
    from jax.experimental import multihost_utils

    return bool(np.any(multihost_utils.process_allgather(np.int32(flag))))


def common_number(number: int) -> int:
    """The first process's number below 2**31, on every process. Every process must call it."""
    if jax.process_count() == 1:
        return number
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def bytes_of_all(data: bytes) -> list[bytes]:
    """Every process's bytes in the order of the processes, on every process. Every process must call it."""
    if jax.process_count() == 1:
        return [data]
    from jax.experimental import multihost_utils

    lengths = np.asarray(multihost_utils.process_allgather(np.int32(len(data)))).ravel().tolist()
    received = [bytearray() for _ in lengths]
    for first in range(0, max(lengths), _CHUNK):
        piece = np.frombuffer(data[first : first + _CHUNK].ljust(_CHUNK, b"\0"), np.uint8)
        for buffer, row in zip(received, np.asarray(multihost_utils.process_allgather(piece)), strict=True):
            buffer += row.tobytes()
    return [bytes(buffer[:length]) for buffer, length in zip(received, lengths, strict=True)]


def common_bytes(data: bytes) -> bytes:
    """The first process's bytes, on every process. Every process must call it."""
    if jax.process_count() == 1:
        return data
    from jax.experimental import multihost_utils

    received = bytearray()
    length = common_number(len(data))
    for first in range(0, length, _CHUNK):  # in pieces of one shape: nothing compiles (law 3)
        piece = np.frombuffer(data[first : first + _CHUNK].ljust(_CHUNK, b"\0"), np.uint8)
        received += np.asarray(multihost_utils.broadcast_one_to_all(piece)).tobytes()
    return bytes(received[:length])
