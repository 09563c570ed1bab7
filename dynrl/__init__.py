"""dynrl: reinforcement learning of language models from verifiable rewards, in JAX.

Importing the package imports neither JAX nor Flax: verifier workers and the controller's simulations start
without them. `dynrl.run` and the sub-packages load on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynrl import core, models, rollout, sampling, tasks, training
    from dynrl.loop import RunResult, run

__version__ = "0.1.0"
__all__ = ["RunResult", "core", "models", "rollout", "run", "sampling", "tasks", "training"]


def __getattr__(name: str) -> Any:
    """Loads `dynrl.run`, `dynrl.RunResult` and the sub-packages lazily (PEP 562)."""
    if name in ("run", "RunResult"):
        return getattr(importlib.import_module("dynrl.loop"), name)
    if name in __all__:
        return importlib.import_module(f"dynrl.{name}")
    raise AttributeError(f"module 'dynrl' has no attribute {name!r}")
