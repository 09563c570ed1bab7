"""What a run draws its tasks by: a selector, a floor share of the base distribution, and new tasks first."""

from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from dynrl.tasks.selectors.base import Selector
from dynrl.tasks.selectors.epoch import EpochSelector
from dynrl.tasks.selectors.randomness import checked_seed, counter_words, refuse_other_seed
from dynrl.types import Outcome

if TYPE_CHECKING:
    from dynrl.tasks.store import TaskStore


class Draw(NamedTuple):
    """A task that was drawn.

    Attributes:
      task_id: its id.
      base: whether it was drawn from the base distribution, whatever is known of it: by the floor, or by a selector
        that draws base tasks as they come. Rewards of these groups say how the policy does on the whole (law 8).
    """

    task_id: int
    base: bool


class Selection:
    """Draws by a selector, and by turns by a floor that every run needs.

    The floor is an `EpochSelector` over the base region of the store (over all of it where there is no base). Its draws
    lie evenly among the others: of any stretch of draws, however it is cut, it has its share to within one. A selector
    that aims at certain tasks forgets the rest, and its rewards say nothing of how the policy does there: hence the
    floor.

    The parts are drawn apart, so that a task may come from both in one draw, most of all from a small store.

    Args:
      selector: for all draws that are not the floor's.
      seed: of the floor, 0 <= seed < 2**64; it may be the selector's.
      floor_share: in 0 to 1, taken as it is written: 0.1 is one draw in ten.
      new_first: whether appended tasks that nobody has drawn yet come before what the selector draws, in order of id.

    Raises:
      ValueError: floor_share is out of range, or not 0 for a selector that is the base distribution itself.
    """

    def __init__(self, selector: Selector, seed: int, *, floor_share: float, new_first: bool):
        if not 0 <= floor_share <= 1:
            raise ValueError(f"floor_share must lie in 0 to 1, got {floor_share}")
        self._is_base = bool(getattr(selector, "is_base_distribution", False))
        if self._is_base and floor_share:
            raise ValueError(
                f"floor_share = {floor_share} has no meaning for {type(selector).__name__}, all of whose draws are of "
                "the base distribution: set it to 0"
            )
        self.selector = selector
        self._seed = checked_seed(seed)
        # Of its own seed: a selector that goes through epochs would draw the same tasks at the same time.
        self._floor = EpochSelector(int(counter_words(self._seed, "selection/floor", 1)[0]))
        self._share = Fraction(str(floor_share))
        self._owed = 0  # to the floor, in parts of a draw of which the share's denominator makes one
        self._new_first = new_first
        self._next_new = 0  # appended tasks below were drawn
        self._drawn_ahead: set[int] = set()  # and these above

    def draw(self, n: int, store: "TaskStore") -> list[Draw]:
        """Returns n draws; fewer mean that the data ended."""
        turns, owed = self._turns(n)
        floor_ids = self._floor.draw(sum(turns), range(store.num_base or len(store)))
        if self._new_first:
            first_new = max(self._next_new, store.num_base)
            self._drawn_ahead.update(task_id for task_id in floor_ids if task_id >= first_new)
        floor = iter([Draw(task_id, True) for task_id in floor_ids])
        rest = iter(self._draw_rest(n - sum(turns), store))
        draws: list[Draw] = []
        for is_floor, owes in zip(turns, owed, strict=True):
            draw = next(floor if is_floor else rest, None)
            if draw is None:
                break
            draws.append(draw)
            self._owed = owes
        return draws

    def observe(self, outcome: Outcome) -> None:
        """Tells the selector of a judged group, whoever drew it."""
        self.selector.observe(outcome)

    def num_selectable(self, store: "TaskStore") -> int | None:
        """Returns how many tasks the selector has left to select from; None where it does not say."""
        count = getattr(self.selector, "num_selectable", None)
        return None if count is None else int(count(store))

    def state_dict(self) -> dict[str, Any]:
        """Returns the seed, the state of both parts, what the floor is owed, and which appended tasks were drawn."""
        return {
            "seed": self._seed,
            "selector": self.selector.state_dict(),
            "floor": self._floor.state_dict(),
            "floor_share": str(self._share),
            "owed": self._owed,
            "next_new": self._next_new,
            "drawn_ahead": sorted(self._drawn_ahead),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at a saved place. Raises ValueError for another floor share or seed."""
        refuse_other_seed(state, self._seed)
        if state["floor_share"] != str(self._share):
            raise ValueError(f"the saved selection has floor_share {state['floor_share']}, this one {self._share}")
        self.selector.load_state_dict(state["selector"])
        self._floor.load_state_dict(state["floor"])
        self._owed = state["owed"]
        self._next_new = state["next_new"]
        self._drawn_ahead = set(state["drawn_ahead"])

    def _turns(self, n: int) -> tuple[list[bool], list[int]]:
        """Returns for each of the next n draws whether it is the floor's, and what the floor is owed after it."""
        turns, owed = [], []
        owes = self._owed
        for _ in range(n):
            owes += self._share.numerator
            turns.append(owes >= self._share.denominator)
            owes -= turns[-1] * self._share.denominator
            owed.append(owes)
        return turns, owed

    def _draw_rest(self, n: int, store: "TaskStore") -> list[Draw]:
        ids = self._new_ones(n, store) if self._new_first else []
        if len(ids) < n:
            ids += [int(task_id) for task_id in self.selector.draw(n - len(ids), store)]
        return [Draw(task_id, self._is_base and task_id < store.num_base) for task_id in ids]

    def _new_ones(self, n: int, store: "TaskStore") -> list[int]:
        """Returns up to n appended tasks that were not drawn yet, and takes note of it."""
        new: list[int] = []
        self._next_new = max(self._next_new, store.num_base)
        while len(new) < n and self._next_new < len(store):
            if self._next_new not in self._drawn_ahead:
                new.append(self._next_new)
            self._drawn_ahead.discard(self._next_new)
            self._next_new += 1
        return new
