"""Selectors: which tasks to spend rollouts on next, and how often each was drawn before.

A selector reads the store's length at every draw, so appended tasks are in reach at once. Its choices are pure
functions of its seed, its state and the store. Nothing here knows JAX or the controller.
"""

from dynrl.tasks.selectors.base import BUILT_IN_SELECTORS, Selector, make_selector
from dynrl.tasks.selectors.difficulty_pools import DifficultyPoolsSelector
from dynrl.tasks.selectors.epoch import EpochSelector
from dynrl.tasks.selectors.greso import GresoSelector
from dynrl.tasks.selectors.learnability import LearnabilitySelector
from dynrl.tasks.selectors.posterior import PassRates, PosteriorSelector
from dynrl.tasks.selectors.randomness import counter_words
from dynrl.tasks.selectors.selection import Draw, Selection
from dynrl.tasks.selectors.thompson import ThompsonSelector
from dynrl.tasks.selectors.uniform import UniformSelector
from dynrl.tasks.selectors.visits import VisitCounter
from dynrl.tasks.selectors.weighted import WeightedSelector

__all__ = [
    "BUILT_IN_SELECTORS",
    "DifficultyPoolsSelector",
    "Draw",
    "EpochSelector",
    "GresoSelector",
    "LearnabilitySelector",
    "PassRates",
    "PosteriorSelector",
    "Selection",
    "Selector",
    "ThompsonSelector",
    "UniformSelector",
    "VisitCounter",
    "WeightedSelector",
    "counter_words",
    "make_selector",
]
