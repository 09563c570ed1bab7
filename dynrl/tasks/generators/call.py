"""One call of a generator's `propose`, in a thread beside training.

The thread gives back plain data only, whatever the generator made. `generate` waits in it until training asks for the
proposals, and is served then, by the thread that drives the devices.
"""

import json
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dynrl.tasks.generators.base import Cancelled, GeneratorContext, TaskGenerator
from dynrl.tasks.proposals import rows_of

_GRACE_SECS = 2.0  # for a generator that is told to end


class Done(NamedTuple):
    """What became of a call.

    Attributes:
      rows: of the proposals, see `rows_of`.
      spent: what the generator counted.
      state: of the generator, afterwards; None where it is not to be had, since it goes on or failed.
      error: what it raised, in a line; empty where all went well.
    """

    rows: list[dict[str, Any] | None]
    spent: dict[str, int]
    state: Any
    error: str


class Wanted(NamedTuple):
    """The generator asks for completions of these prompts, as token ids; see `Call.reply`."""

    prompts: list[list[int]]


class Call:
    """Runs `propose`.

    Args:
      generator: whose.
      make_context: makes the context, given `generate` and what says that nobody waits any more.
      encode: of a prompt; ValueError, naming it, for one that the policy cannot be given.
      timeout_secs: how long somebody waits.
    """

    def __init__(
        self, generator: TaskGenerator, make_context: Callable[..., GeneratorContext],
        encode: Callable[[str], list[int]], timeout_secs: float,
    ) -> None:  # fmt: skip
        self._encode = encode
        self._deadline = time.monotonic() + timeout_secs
        self._timeout_secs = timeout_secs
        self._cancelled = threading.Event()
        self._out: queue.SimpleQueue[Wanted | Done] = queue.SimpleQueue()
        self._texts: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        context = make_context(generate=self._generate, deadline=self._deadline, cancelled=self._cancelled)
        self._thread = threading.Thread(target=self._run, args=(generator, context), daemon=True, name="generator")
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    def next(self) -> Wanted | Done:
        """Waits for what the generator wants or has done, until the deadline."""
        try:
            return self._out.get(timeout=max(0.0, self._deadline - time.monotonic()))
        except queue.Empty:
            self.cancel()
        late = f"gave nothing within generation.deadline_secs = {self._timeout_secs:g}"
        end = time.monotonic() + _GRACE_SECS
        while (left := end - time.monotonic()) > 0:
            try:
                message = self._out.get(timeout=left)
            except queue.Empty:
                break
            if isinstance(message, Done):  # too late, but what it spent is known
                return Done([], message.spent, message.state, late)
        return Done([], {}, None, late)

    def reply(self, texts: Sequence[str]) -> None:
        """Answers a `Wanted`."""
        self._texts.put(list(texts))

    def cancel(self) -> None:
        """Nobody waits any more."""
        self._cancelled.set()

    # ---- In the thread ----

    def _generate(self, prompts: Sequence[str]) -> list[str]:
        self._out.put(Wanted([self._encode(prompt) for prompt in prompts]))
        while True:
            try:
                return self._texts.get(timeout=0.1)
            except queue.Empty:
                if self._cancelled.is_set():
                    raise Cancelled("nobody waits for these proposals any more") from None

    def _run(self, generator: TaskGenerator, context: GeneratorContext) -> None:
        done = Done([], {}, None, "")
        try:
            done = done._replace(rows=rows_of(generator.propose(context)))
        except BaseException as raised:  # also SystemExit: it would end the thread without a word
            done = done._replace(error=_line(raised))
        try:
            spent = {str(k): int(v) for k, v in context.spent.items() if isinstance(v, int)}
            state = json.loads(json.dumps(generator.state_dict(), allow_nan=False))
            done = done._replace(spent=spent, state=state)
        except BaseException as raised:
            done = done._replace(rows=[], error=done.error or f"state_dict: {_line(raised)}")
        self._out.put(done)


def _line(error: BaseException) -> str:
    """An error in a line, with where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}{where}"
