"""User code that the end-to-end runs are configured with: verifiers, a filter and a selector.

The verifiers judge by a hash of prompt and completion. So a random policy has groups of every kind at once, and no
test depends on what a policy learns. Verifier workers import this module, which must be light.
"""

import os
import time
import zlib

from dynrl.tasks.environments import Environment, Step


def coin(task, text):
    """1 or 0, as likely."""
    return float(zlib.crc32(f"{task.prompt} {text}".encode()) & 1)


def sorts(task, text):
    """Of the reference answer, whether it is right; of anything else 1 or 0, as likely."""
    return float("".join(sorted(text)) == text) if text == task.answer else coin(task, text)


def rare(task, text):
    """1 for about one completion in five: many groups are all wrong."""
    return float(zlib.crc32(f"{task.prompt} {text}".encode()) % 5 == 0)


def never(task, text):
    """No group has signal."""
    return 0.0


def skewed(task, text):
    """As `coin` on the first process; on the second slower, right for one in five only, and at times it raises."""
    number = zlib.crc32(f"{task.prompt} {text}".encode())
    if os.environ.get("DYNRL_TEST_PROCESS") != "1":
        return float(number & 1)
    time.sleep(0.01)
    if zlib.crc32(task.prompt.encode()) % 11 == 0:
        raise RuntimeError("the judge is out")
    return float(number % 5 == 0)


def broken(task, text):
    """A verifier with a fault."""
    raise RuntimeError("the judge is out")


def in_bursts(stats, rewards_PG, live_PG):
    """A filter whose kept counts range widely: none, a third, or all groups with signal, by the rewards' sum."""
    import jax.numpy as jnp

    total = jnp.where(live_PG, rewards_PG, 0.0).sum().astype(jnp.int32)
    third = jnp.arange(stats.count.shape[0]) % 3 == 0
    signal = stats.max > stats.min
    return jnp.where(total % 4 == 0, False, jnp.where(total % 4 == 1, third & signal, signal))


def stumbles(task, text):
    """Raises for one task in ten."""
    if zlib.crc32(task.prompt.encode()) % 10 == 0:
        raise RuntimeError("the judge is out")
    return coin(task, text)


def hangs(task, text):
    """Never comes back from one task in ten."""
    if zlib.crc32(task.prompt.encode()) % 10 == 0:
        time.sleep(60)
    return coin(task, text)


def hangs_always(task, text):
    """Never comes back."""
    time.sleep(60)


class NumpySelector:
    """Draws ids that are NumPy's, not Python's."""

    def __init__(self, seed):
        self.seed, self.num_draws = seed, 0

    def draw(self, n, store):
        import numpy as np

        self.num_draws += 1
        return np.random.default_rng([self.seed, self.num_draws]).choice(len(store), n)

    def observe(self, outcome):
        pass

    def state_dict(self):
        return {"num_draws": self.num_draws}

    def load_state_dict(self, state):
        self.num_draws = state["num_draws"]


def raises(metric_vals):
    """A filter with a fault."""
    raise KeyError("fault")


class Talker(Environment):
    """Says something to every turn of up to two tokens' worth, and judges by a hash of all that was said."""

    stop_strings = ("]", "1", "2")
    max_observation_chars = 3

    def reset(self, task):
        self.said, self.prompt = "", task.prompt
        return ""

    def step(self, text):
        self.said += text
        done = text == "" or len(self.said) > 6
        return Step("7;", float(zlib.crc32(f"{self.prompt} {self.said}".encode()) & 1), done)
