"""Advantages of the rollouts in a group: one function for every estimator, and the check of its options.

The masking of single rollouts (truncated ones, say) comes after this: the baseline always sees them. Advantages are
computed when a batch is assembled, on the whole batch, never stored.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from dynrl.core.checks import check_choice, check_number, did_you_mean
from dynrl.core.estimators import ESTIMATORS, Estimator, Inputs
from dynrl.core.group_stats import AxisName
from dynrl.types import Array

_RANGES: dict[str, dict[str, Any]] = {
    "ddof": {"at_least": 0, "integer": True},
    "eps": {"at_least": 0},
    "atol": {"at_least": 0},
    "rtol": {"at_least": 0},
    "alpha": {"at_least": 0},
    "k": {"at_least": 1, "integer": True},
}


def check_estimator(name: str, kwargs: Mapping[str, Any]) -> Estimator:
    """Checks an estimator's name and options before anything runs; the arrays it takes are not among them.

    Args:
      name: of the estimator.
      kwargs: its options, as `group_advantages` takes them.

    Returns:
      The Estimator, which declares what it needs and does.

    Raises:
      ValueError: for an unknown name (with near matches), or an option out of range.
      TypeError: for an option that the estimator does not have (with near matches).
    """
    check_choice("estimator", name, ESTIMATORS)
    estimator = ESTIMATORS[name]
    for key, value in kwargs.items():
        what = f"estimator {name!r}: {key}"
        if key not in estimator.keywords:
            hint = did_you_mean(key, estimator.keywords)
            raise TypeError(f"estimator {name!r} takes {', '.join(estimator.keywords)}; got {key!r}{hint}")
        if key in _RANGES:
            check_number(what, value, **_RANGES[key])
        elif key == "batch_norm" and not isinstance(value, bool | np.bool_):
            raise ValueError(f"{what} must be True or False, got {value!r}")
        elif key == "weights" and value is not None:
            _check_weights(what, value)
    return estimator


def _check_weights(what: str, weights: Any) -> None:
    if not isinstance(weights, tuple | list) or not weights:
        raise ValueError(f"{what} must be a tuple of one number per component, got {weights!r}")
    for weight in weights:
        check_number(what, weight)
    if not any(np.asarray(weights, np.float64)):
        raise ValueError(f"{what} must not all be 0, got {weights!r}")


def group_advantages(
    rewards_PG: Array,
    live_PG: Array | None = None,
    *,
    estimator: str = "grpo",
    axis_name: AxisName = None,
    entropy_PGT: Array | None = None,
    mask_PGT: Array | None = None,
    **kwargs: Any,
) -> Array:
    """Computes the advantage of each rollout over its group's or its batch's baseline.

    | estimator | advantage (formula and source: its docstring in `dynrl.core.estimators`) | options |
    |---|---|---|
    | `grpo` | (r - mean) / (std + eps) | ddof, eps |
    | `dr_grpo` | r - mean | |
    | `rloo` | r - mean of the others | |
    | `reinforce_pp` | (r - batch mean) / (batch std + eps); not 0 in groups without signal | ddof, eps |
    | `reinforce_pp_baseline` | (r - mean) / (batch std + eps) | ddof, eps |
    | `pass_at_k` | of a draw of k that succeeds if one of it does | k |
    | `gdpo` | sum of each component's `grpo` over the batch's std | weights, batch_norm, ddof, eps |
    | `rl_zvp` | `grpo`, and token entropies in groups without signal | alpha, ddof, eps |

    Args:
      rewards_PG: numbers, the estimator's own input; anything where a rollout is dead. [P, G, K] for `gdpo`. A reward
        that is NaN or infinite in float32 makes its rollout dead.
      live_PG: bool, or None for all live.
      estimator: a name in `ESTIMATORS`.
      axis_name: mesh axes that the batch's groups are spread over, under pmap or shard_map; only estimators that are
        `batch_normalised` read it.
      entropy_PGT: nats, for `rl_zvp`; a constant. Anything where masked out.
      mask_PGT: bool, the tokens to train on, for `rl_zvp`.
      **kwargs: the estimator's options. All take `atol` and `rtol`, the tolerances of `has_signal`. `ddof` and `eps`
        are ignored where there is no std.

    Returns:
      float32 [P, G], [P, G, T] from `rl_zvp`; exactly 0 for dead rollouts and in groups without signal, but for
      estimators that declare `uses_uniform_groups`.

    Raises:
      ValueError: at trace time, for an unknown estimator, an option out of range, or shapes that do not fit.
      TypeError: at trace time, for options or arrays that the estimator does not take, or lacks.
    """
    known = ESTIMATORS[estimator].keywords if estimator in ESTIMATORS else ()
    kwargs = {key: value for key, value in kwargs.items() if key in known or key not in ("ddof", "eps")}
    declared = check_estimator(estimator, kwargs)
    rewards_PG = jnp.asarray(rewards_PG)
    live_PG = None if live_PG is None else jnp.asarray(live_PG)
    _check_shapes(estimator, rewards_PG, live_PG, entropy_PGT, mask_PGT)
    return declared.function(Inputs(rewards_PG, live_PG, axis_name, entropy_PGT, mask_PGT), **kwargs)


def _check_shapes(
    name: str, rewards: Array, live_PG: Array | None, entropy_PGT: Array | None, mask_PGT: Array | None
) -> None:
    declared = ESTIMATORS[name]
    axes = "[P, G, K]" if declared.per_component else "[P, G]"
    if rewards.ndim != (3 if declared.per_component else 2):
        raise ValueError(f"estimator {name!r} takes rewards with the axes {axes}, got shape {rewards.shape}")
    shape_PG = rewards.shape[:2]
    if live_PG is not None and live_PG.shape != shape_PG:
        raise ValueError(f"live_PG has shape {live_PG.shape}, the rewards have {rewards.shape}")
    tokens = {"entropy_PGT": entropy_PGT, "mask_PGT": mask_PGT}
    for key, array in tokens.items():
        if (array is not None) != declared.per_token:
            raise TypeError(f"estimator {name!r} {'needs' if declared.per_token else 'takes no'} {key}")
    shapes = {key: jnp.shape(array) for key, array in tokens.items() if array is not None}
    if any(len(shape) != 3 or shape[:2] != shape_PG for shape in shapes.values()) or len(set(shapes.values())) > 1:
        raise ValueError(f"estimator {name!r} takes {', '.join(tokens)} of one shape [P, G, T]; got {shapes}")
