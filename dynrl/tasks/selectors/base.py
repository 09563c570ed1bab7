"""What a selector is, and selectors by name."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from dynrl.tasks.sources import build_named
from dynrl.types import Outcome

if TYPE_CHECKING:
    from dynrl.tasks.store import TaskStore

BUILT_IN_SELECTORS: Mapping[str, str] = {
    "difficulty_pools": "dynrl.tasks.selectors.difficulty_pools:DifficultyPoolsSelector",
    "epoch": "dynrl.tasks.selectors.epoch:EpochSelector",
    "greso": "dynrl.tasks.selectors.greso:GresoSelector",
    "learnability": "dynrl.tasks.selectors.learnability:LearnabilitySelector",
    "thompson": "dynrl.tasks.selectors.thompson:ThompsonSelector",
    "uniform": "dynrl.tasks.selectors.uniform:UniformSelector",
    "weighted": "dynrl.tasks.selectors.weighted:WeightedSelector",
}


class Selector(Protocol):
    """Chooses tasks. `draw` and `observe` are called in one order on every process.

    Besides what stands here, a selector may have two members that `Selection` asks for. `is_base_distribution` is True
    where it draws base tasks as they come, so that their rewards say how the policy does on the whole. And
    `num_selectable(store)` is how many tasks it has left to select from, those that rest or are skipped not counted.
    """

    def draw(self, n: int, store: "TaskStore") -> list[int]:
        """Returns the ids of n tasks of the store; fewer mean that the data ended."""
        ...

    def observe(self, outcome: Outcome) -> None:
        """Learns from one judged group, kept or not."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns JSON-able state."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues exactly where the saved selector stood. Raises ValueError for another selector's state."""
        ...


def make_selector(name_or_path: str, **kwargs: Any) -> Selector:
    """Returns a selector.

    Args:
      name_or_path: one of `BUILT_IN_SELECTORS`, or `package.module:Class`.
      **kwargs: the class's arguments.

    Raises:
      ValueError: at an unknown name or path, with near matches.
      TypeError: at an argument that the class does not take, or a class that is no `Selector`.
    """
    members = ("draw", "observe", "state_dict", "load_state_dict")
    return build_named("selector", name_or_path, BUILT_IN_SELECTORS, members, kwargs)
