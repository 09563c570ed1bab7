"""The slot engine's state on the devices, and the compiled programs that hand it to each other."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dynrl.config import ModelConfig
from dynrl.models import sharding
from dynrl.models.decoder import Params, init_params, unstack_layers
from dynrl.models.policy import cast_floats
from dynrl.sampling import programs
from dynrl.sampling.memory import CacheShape
from dynrl.sampling.options import EngineOptions
from dynrl.sampling.state import EngineState, Local, empty_state
from dynrl.types import Array, Payload


class Device:
    """Each method dispatches one program on an array from `host_arrays.py`, and waits for nothing.

    Args:
      config: the architecture.
      mesh: the device mesh.
      options: the engine's.
      shape: sizes of its arrays.
      vocab_size: V.
      pad_id: fills completions.
      seed: the root of all noise.
    """

    def __init__(
        self, config: ModelConfig, mesh: Mesh, options: EngineOptions, shape: CacheShape, *, vocab_size: int,
        pad_id: int, seed: int,
    ) -> None:  # fmt: skip
        self._config, self._mesh = config, mesh
        decoding = dataclasses.replace(config, scan_layers=False)  # decoding is unrolled
        local = Local(mesh, config.num_kv_heads)
        whole, rows = sharding.replicated(mesh), sharding.rows(mesh)
        self._seed = sharding.place(np.uint32(seed), whole)

        trained = jax.eval_shape(partial(init_params, config, vocab_size), jax.random.key(0))
        p = sharding.param_shardings(jax.eval_shape(self._decode_layout, trained), mesh)
        self.decode_layout = jax.jit(self._decode_layout, out_shardings=p)
        empty = partial(empty_state, shape, options.num_slots)
        s = local.state_shardings(jax.eval_shape(empty))
        self.state: EngineState = jax.jit(empty, out_shardings=s)()

        def jit(function: Any, ins: Any, outs: Any, donate: Any = (), **fixed: Any) -> Any:
            return jax.jit(
                partial(function, **fixed), in_shardings=(*ins, rows), out_shardings=outs, donate_argnums=donate,
                compiler_options=self.compiler_options,
            )  # fmt: skip

        self.compiler_options = _compiler_options(config)
        model = {"config": decoding, "local": local}
        self._prefill = jit(programs.prefill, (p, s.prefix), s.prefix, 1, **model)
        self._chunk = jit(
            programs.chunk, (p, s, whole, whole), (s, whole, whole), 1, chunk_steps=options.chunk_steps, **model
        )
        self._stop = jit(programs.stop, (s.slots,), s.slots, 0)
        self._scrub = jit(programs.scrub, (s.layers,), s.layers, 0)
        self._extend = jit(programs.extend, (p, s), s, 1, **model)
        full = rows if options.full_logprobs else None
        size = {"pad_id": pad_id, "local": local}
        self._hand_over = {
            g: jit(programs.hand_over, (s.outputs,), (rows, full), g=g, **size) for g in set(options.group_sizes)
        }

    def _decode_layout(self, params: Params) -> Params:
        return cast_floats(unstack_layers(params, self._config.num_layers), self._config.dtype)

    def _rows(self, host: np.ndarray) -> np.ndarray | Array:
        """Each device gets the rows of its own shard.

        Within one process the array goes straight into the program: placing it first would cost as much as the call.
        """
        return host if jax.process_count() == 1 else sharding.place(host, sharding.rows(self._mesh))

    def prefill(self, params: Params, host: np.ndarray) -> None:
        """See `programs.prefill`."""
        self.state = self.state._replace(prefix=self._prefill(params, self.state.prefix, self._rows(host)))

    def chunk(self, params: Params, control: Sequence[int], host: np.ndarray) -> tuple[Array, Array]:
        """See `programs.chunk`. Returns the report and the drawn tokens."""
        numbers = np.array(control, np.int32)
        self.state, report, tokens = self._chunk(params, self.state, self._seed, numbers, self._rows(host))
        return report, tokens

    def stop(self, host: np.ndarray) -> None:
        """See `programs.stop`."""
        self.state = self.state._replace(slots=self._stop(self.state.slots, self._rows(host)))

    def scrub(self, host: np.ndarray) -> None:
        """See `programs.scrub`."""
        self.state = self.state._replace(layers=self._scrub(self.state.layers, self._rows(host)))

    def extend(self, params: Params, host: np.ndarray) -> None:
        """See `programs.extend`."""
        self.state = self._extend(params, self.state, self._rows(host))

    def hand_over(self, num_samples: int, host: np.ndarray) -> tuple[Payload, Array | None]:
        """See `programs.hand_over`."""
        return self._hand_over[num_samples](self.state.outputs, self._rows(host))


def _compiler_options(config: ModelConfig) -> dict[str, str] | None:
    """On a CPU: matmuls by Eigen.

    XLA's default there, YNNPACK, takes up to a third longer for the few rows of a decode step (32 rows, widths 128 and
    256); at 128 rows both take as long. With grouped queries of small heads (16) Eigen takes up to 1.6 times as long:
    those are left to the default.
    """
    options = {"xla_cpu_experimental_ynn_fusion_type": ""}
    if jax.default_backend() != "cpu" or config.num_heads != config.num_kv_heads:
        return None
    try:
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except jax.errors.JaxRuntimeError:  # another version of XLA
        return None
    return options
