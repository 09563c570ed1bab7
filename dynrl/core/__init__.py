"""Pure functions of arrays: group statistics, filters, penalties, advantages, losses, log-probs and packing.

Everything here works eagerly and under jit, vmap, pmap and shard_map, and knows nothing of configs, models or I/O.
The path of a batch through it:

    stats = group_stats(rewards_PG, live_PG)
    keep_P = make_filter("has_signal")(stats, rewards_PG, live_PG)
    buffer, count, overflow = scatter_kept(buffer, count, rows, keep_P)
    advantages_PG = group_advantages(rewards_PG, live_PG, estimator="grpo")
    loss_sum, weight_sum, metrics = policy_loss(logp_NT, old_logp_NT, behavior_logp_NT, advantages_N, mask_NT)
"""

from dynrl.core.advantages import check_estimator, group_advantages
from dynrl.core.estimators import ESTIMATORS, Estimator
from dynrl.core.filters import GroupFilter, make_filter
from dynrl.core.group_stats import GroupStats, group_stats, has_signal
from dynrl.core.logprobs import token_logprobs
from dynrl.core.losses import AGGREGATIONS, policy_loss
from dynrl.core.masking import completion_mask, masked_sum_count, safe_divide
from dynrl.core.overlong import shaped_rewards, soft_overlong_penalty
from dynrl.core.packing import scatter_kept, scatter_rows
from dynrl.core.surrogates import KL_ESTIMATORS, LOSSES

__all__ = [
    "AGGREGATIONS",
    "ESTIMATORS",
    "KL_ESTIMATORS",
    "LOSSES",
    "Estimator",
    "GroupFilter",
    "GroupStats",
    "check_estimator",
    "completion_mask",
    "group_advantages",
    "group_stats",
    "has_signal",
    "make_filter",
    "masked_sum_count",
    "policy_loss",
    "safe_divide",
    "scatter_kept",
    "scatter_rows",
    "shaped_rewards",
    "soft_overlong_penalty",
    "token_logprobs",
]
