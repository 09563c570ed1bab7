"""Checkpoints by orbax: arrays (weights, optimizer, group buffer) and one JSON document (everything else).

Saved at step boundaries only, so that a restart goes on exactly where an uninterrupted run would be (law 7). Orbax
renames a finished checkpoint into place; a killed writer leaves nothing that looks like one.
"""

from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from dynrl.config import CheckpointConfig


class Checkpointer:
    """Numbered checkpoints in one directory.

    Args:
      directory: created when missing.
      config: how many to keep.
    """

    def __init__(self, directory: epath.Path, config: CheckpointConfig) -> None:
        # Orbax would share the writing of a replicated array among its replicas, by slices that compile (law 3).
        handler = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
        ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)
        options = ocp.CheckpointManagerOptions(max_to_keep=config.max_to_keep, create=True)
        self._directory = directory
        self._manager = ocp.CheckpointManager(directory, options=options)

    @property
    def latest(self) -> int | None:
        """The step of the newest finished checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, document: dict[str, Any], **arrays: Any) -> None:
        """Copies the arrays, trees by item, from the devices, then writes in the background."""
        items = {name: ocp.args.StandardSave(tree) for name, tree in arrays.items()}
        args = ocp.args.Composite(document=ocp.args.JsonSave(document), **items)
        self._manager.save(step, args=args, force=True)

    def restore_document(self, step: int) -> dict[str, Any]:
        """The JSON document of a checkpoint. Raises RuntimeError for one that is damaged."""
        return self._restore(step, document=ocp.args.JsonRestore())["document"]

    def restore_arrays(self, step: int, like: Any, item: str = "arrays") -> Any:
        """Arrays of a checkpoint, in the tree, shapes, dtypes and shardings of `like`. Raises RuntimeError as above.

        `item` is "arrays" or "in_flight", as they were saved.
        """
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        restored = self._restore(step, **{item: ocp.args.StandardRestore(abstract)})[item]
        return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(restored))  # tuples come back as lists

    def _restore(self, step: int, **items: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # orbax, tensorstore and JSON each raise their own
            older = [s for s in self._manager.all_steps() if s < step]
            then = f"goes on from step {max(older)}" if older else "begins the run again"
            raise RuntimeError(
                f"the checkpoint {self._directory / str(step)} cannot be read: {type(error).__name__}: {error}\n"
                f"Without that folder, the same command {then}"
            ) from error

    def close(self) -> None:
        """Waits for the writer."""
        self._manager.wait_until_finished()
        self._manager.close()
