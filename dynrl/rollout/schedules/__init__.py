"""Who is dispatched when, and which ready groups a step trains on."""

from dynrl.config import RunConfig
from dynrl.rollout.schedules.base import BaseSchedule, Capabilities, Exhausted, Schedule, View
from dynrl.tasks.sources import build_named

__all__ = ["BUILT_IN_SCHEDULES", "BaseSchedule", "Capabilities", "Exhausted", "Schedule", "View", "make_schedule"]

BUILT_IN_SCHEDULES = {
    "rounds": "dynrl.rollout.schedules.rounds:Rounds",
    "in_order": "dynrl.rollout.schedules.streaming:InOrder",
    "ready_first": "dynrl.rollout.schedules.streaming:ReadyFirst",
    "weight_fifo": "dynrl.rollout.schedules.streaming:WeightFifo",
    "windowed": "dynrl.rollout.schedules.streaming:Windowed",
}
_MEMBERS = [name for name in vars(BaseSchedule) if not name.startswith("_")] + ["admit", "select", "max_open"]


def make_schedule(config: RunConfig) -> Schedule:
    """The schedule that `config.schedule` names.

    A class of yours, as `package.module:Class`, is called with the run's configuration and `schedule.kwargs`.

    Raises:
      ValueError: at an unknown name or path, with near matches.
      TypeError: at an argument that the class does not take, or a class that is no `Schedule`.
    """
    kwargs = {"config": config, **config.schedule.kwargs}
    return build_named("schedule", config.schedule.name, BUILT_IN_SCHEDULES, _MEMBERS, kwargs)
