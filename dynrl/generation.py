"""Dynamic data generation: a generator is asked for new tasks, and those that are fit are appended to the store.

    asked at step n ... the generator works beside training ... admitted at step n + admit_after_steps

Between two steps, all processes admit the same tasks in the same order. The first process runs the generator and
writes down what came of it, in the journal, before anything is done with it, so that a restarted run does the same
again. What a generator does wrong (it raises, hangs, returns rubbish) is counted and told; training goes on.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from dynrl.config import RunConfig
from dynrl.journal import Journal
from dynrl.metrics import Row
from dynrl.models.sharding import common_bytes
from dynrl.models.tokenizer import Tokenizer
from dynrl.results import RunError
from dynrl.rollout.side_rollouts import SideRollouts
from dynrl.tasks.admission import from_row, row_of
from dynrl.tasks.base import TaskSource
from dynrl.tasks.generators.base import GeneratorContext, TaskGenerator
from dynrl.tasks.generators.call import Call, Done, Wanted
from dynrl.tasks.outcomes import TaskOutcomes
from dynrl.tasks.proposals import Proposals, Refused
from dynrl.tasks.selectors import counter_words
from dynrl.tasks.store import TaskStore
from dynrl.types import Outcome, Purpose, SamplingParams, Task, Verdict

_MAX_BACKOFF_STEPS = 64
_KIND_DECAY = 0.9  # of what is known of a level, per group: curricula follow the policy


@dataclasses.dataclass
class Asked:
    """What the generator was asked, and what it may know: as of then, also after a restart."""

    step: int
    version: int
    num_tasks: int  # length of the store
    outcomes: TaskOutcomes


class Generation:
    """Asks the generator, and admits what it proposes.

    Args:
      config: the run's.
      make: makes the generator.
      store: takes the tasks.
      source: of the base tasks.
      proposals: reads what is proposed.
      rollouts: samples and scores.
      tokenizer: of prompts.
      journal: of the run.
      say: tells the user.
    """

    def __init__(
        self, config: RunConfig, make: Callable[[], TaskGenerator], store: TaskStore, source: TaskSource,
        proposals: Proposals, rollouts: SideRollouts, tokenizer: Tokenizer, journal: Journal,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._config, self._options, self._make = config, config.generation, make
        self._store, self._source, self._proposals = store, source, proposals
        self._rollouts, self._tokenizer, self._journal, self._say = rollouts, tokenizer, journal, say
        s = config.sampler
        self._params = SamplingParams(s.temperature, s.max_completion_tokens, stop_strings=s.stop_strings)
        self.name = self._options.generator.rpartition(":")[2]
        self._outcomes = TaskOutcomes(kind_decay=_KIND_DECAY)
        self._generator = make()
        self._state: Any = self._generator.state_dict()  # of the generator, as far as the run knows
        self._asked: Asked | None = None
        self._call: Call | None = None  # on the first process
        self._call_step = -1  # at which it was asked for
        self._admitted = 0  # in the run
        self._prompts = 0  # that the generator had completed, in the run
        self._failures = 0  # in a row
        self._not_before = 0  # the step at which it may be asked again after a failure
        self._row: Counter[str] = Counter()  # of the step
        self._probed: list[Outcome] = []  # what probes showed of tasks that were admitted, since `take_probed`

    def observe_all(self, outcomes: Sequence[Outcome]) -> None:
        """Learns what became of groups, kept or not."""
        self._outcomes.observe_all(outcomes)

    def take_probed(self) -> list[Outcome]:
        """What probes showed of tasks that were admitted since the last call."""
        probed, self._probed = self._probed, []
        return probed

    def is_due(self, step: int) -> bool:
        """Whether something is to be admitted after so many steps."""
        return self._asked is not None and step >= self._asked.step + self._options.admit_after_steps

    # ---- Between two steps ----

    def step(self, step: int, version: int, keep_rate: float | None, num_selectable: int | None) -> tuple[Row, int]:
        """Admits what is due, and asks for more when that is due.

        Args:
          step: steps made.
          version: of the policy.
          keep_rate: of the groups, as far as known.
          num_selectable: tasks that the selector has left to select from, as far as it says.

        Returns:
          Metrics, and how many tokens the policy wrote.

        Raises:
          RunError: the generator failed too often, and the configuration says that this ends the run.
        """
        self._row.clear()
        tokens = self._admit_due(step, version)
        if self._asked is None and self._is_wanted(step, keep_rate, num_selectable):
            self._asked = Asked(step, version, len(self._store), self._outcomes.snapshot())
            self.resume()
            tokens += self._admit_due(step, version)
        return self._metrics(), tokens

    def _is_wanted(self, step: int, keep_rate: float | None, num_selectable: int | None) -> bool:
        c = self._options
        if step >= self._config.num_steps or step < self._not_before or self._room() == 0:
            return False
        return (
            (c.every_steps > 0 and step % c.every_steps == 0)
            or (keep_rate is not None and keep_rate < c.keep_rate_below)
            or (num_selectable is not None and num_selectable < c.selectable_below)
        )

    def _room(self) -> int:
        """Tasks that may be admitted now."""
        c = self._options
        return min(c.max_tasks_per_call, c.max_tasks - self._admitted) if c.max_tasks else c.max_tasks_per_call

    def resume(self) -> None:
        """Sets the generator to work on what it was asked, unless it is known what came of it."""
        asked = self._asked
        if asked is None or jax.process_index() or self._journal.get(*self._fact(asked)) is not None:
            return
        if self._call is not None and self._call.running:
            return  # it hangs: what is asked now fails
        make_context = partial(
            GeneratorContext,
            step=asked.step,
            version=asked.version,
            rng=self._rng(asked.step),
            outcomes=asked.outcomes,
            store=self._store.view(asked.num_tasks),
            source=self._source,
            max_tasks=self._room(),
            once=partial(self._once, asked.step),
        )
        self._call = Call(self._generator, make_context, self._encode, self._options.deadline_secs)
        self._call_step = asked.step

    def _rng(self, step: int) -> np.random.Generator:
        words = counter_words(self._config.seed, f"generator/{self.name}", 2, index=step)
        return np.random.Generator(np.random.Philox(key=words))

    def _once(self, step: int, key: str, call: Callable[[], Any]) -> Any:
        """What `call` returned the first time, also before a restart."""
        fact = ("generator", self.name, step, str(key))
        value = self._journal.get(*fact)
        if value is None:
            value = [json.loads(json.dumps(call()))]
            self._journal.write(fact, value)
        return value[0]

    def _encode(self, prompt: str) -> list[int]:
        tokens, limit = self._tokenizer.encode(prompt), self._config.tasks.max_prompt_tokens
        if len(tokens) > limit:
            raise ValueError(
                f"prompt {prompt[:80]!r} has {len(tokens)} tokens, more than tasks.max_prompt_tokens = {limit}"
            )
        return tokens

    # ---- Admission ----

    def _fact(self, asked: Asked) -> tuple[Any, ...]:
        return ("generated", self.name, asked.step)

    def _admit_due(self, step: int, version: int) -> int:
        asked = self._asked
        if asked is None or not self.is_due(step):
            return 0
        fact, tokens = self._hear(asked)
        self._asked, self._state = None, fact["state"]
        self._row.update({f"tasks/refused/{reason}": n for reason, n in fact["refused"].items()})
        self._row.update({f"generator/{self.name}/{k}": n for k, n in fact["spent"].items()})
        self._row[f"generator/{self.name}/proposed"] += fact["proposed"]
        self._count_failure(fact["error"], asked, step)
        tasks = [from_row(row, -1) for row in fact["tasks"]]
        if tasks and self._options.probe_samples:
            tasks, spent = self._probe(tasks, asked, step, version)
            tokens += spent
        self._store.append(tasks, step=step, version=version, generator=self.name)
        self._admitted += len(tasks)
        self._row["tasks/appended"] += len(tasks)
        return tokens

    def _hear(self, asked: Asked) -> tuple[dict[str, Any], int]:
        """What came of it, on every process, and how many tokens the policy wrote for it on the way."""
        known = self._journal.get(*self._fact(asked))
        replayed, written, tokens = list(known["prompts"]) if known else [], [], 0
        while True:
            message: dict[str, Any] = {}
            if known is not None:  # what the policy wrote then, it writes again: what is under way goes on as it did
                message = {"prompts": replayed.pop(0)} if replayed else {"fact": known}
            elif jax.process_index() == 0:
                message = self._first_to_know(asked, written)
            message = json.loads(common_bytes(json.dumps(message).encode()))
            if "fact" in message:
                if known is not None:
                    self._generator.load_state_dict(known["state"])
                return message["fact"], tokens
            if "problem" in message:
                raise RunError(message["problem"])
            prompts = message["prompts"]
            texts, num = self._rollouts.complete(prompts, self._params, self._prompts, asked.step)
            self._prompts += len(prompts)
            tokens += num
            if known is None and self._call is not None:
                written.append(prompts)
                self._call.reply(texts)

    def _first_to_know(self, asked: Asked, written: list[Any]) -> dict[str, Any]:
        """What the first process tells the others."""
        try:
            return self._next(asked, written)
        except Exception as problem:  # of the verifiers, or of the source
            if jax.process_count() == 1:
                raise
            return {"problem": f"{type(problem).__name__}: {problem}"}

    def _next(self, asked: Asked, written: list[Any]) -> dict[str, Any]:
        """That the generator wants completions, or what came of it."""
        if self._call is None or self._call_step != asked.step:
            out = Done([], {}, self._state, f"is still in its call of step {self._call_step}")
        else:
            out = self._call.next()
        if isinstance(out, Wanted):
            return {"prompts": out.prompts}
        if out.state is None:  # the thread goes on with what it has: another one takes its place
            self._generator = self._make()
            self._generator.load_state_dict(self._state)
            out = out._replace(state=self._state)
        read = self._proposals.read(out.rows, self._room())
        tasks, refused = [x for x in read if isinstance(x, Task)], Counter(x for x in read if isinstance(x, Refused))
        if tasks and self._options.self_check:
            passed = self._rollouts.references_pass(tasks, self._config.evaluation.pass_score)
            refused[Refused.ANSWER] += passed.count(False)
            tasks = [task for task, ok in zip(tasks, passed, strict=True) if ok]
        fact = {
            "tasks": [row_of(task) for task in tasks],
            "refused": dict(refused),
            "proposed": len(out.rows),
            "spent": out.spent,
            "state": out.state,
            "error": out.error,
            "prompts": written,
        }
        self._journal.write(self._fact(asked), fact)
        return {"fact": fact}

    def _probe(self, tasks: list[Task], asked: Asked, step: int, version: int) -> tuple[list[Task], int]:
        """Those of the tasks that the policy solves sometimes, and how many tokens it wrote to find out."""
        first, k = len(self._store), self._options.probe_samples
        # Under the ids that they would have if all were admitted; the step of asking tells later ones apart.
        numbered = [dataclasses.replace(task, task_id=first + i) for i, task in enumerate(tasks)]
        scored = self._rollouts.score(numbered, k, Purpose.PROBE, self._params, step, asked.step)
        passed_NG = scored.live_NG & (scored.score_NG >= self._config.evaluation.pass_score - 1e-6)
        kept: list[Task] = []
        for task, passed_G, live_G in zip(tasks, passed_NG, scored.live_NG, strict=True):
            num, live = int(passed_G.sum()), int(live_G.sum())
            if not 0 < num < live:
                self._row[f"tasks/refused/{Refused.PROBE}"] += 1
                continue
            where, mean = first + len(kept), num / live
            kind = task.source, task.level
            self._probed.append(Outcome(where, -1, Verdict.KEPT, live, num, mean, version, *kind, signal=True))
            kept.append(task)
        return kept, scored.num_tokens

    def _count_failure(self, error: str, asked: Asked, step: int) -> None:
        """Tells of a failure, and when the generator is asked again; or ends the run."""
        if not error:
            self._failures = 0
            return
        c = self._options
        self._failures += 1
        self._row[f"generator/{self.name}/failures"] += 1
        self._not_before = step + min(2 ** (self._failures - 1), _MAX_BACKOFF_STEPS)
        message = f"generator {self.name}, asked at step {asked.step}: {error} ({self._failures} failures in a row)"
        enough = self._failures >= c.max_consecutive_generator_failures
        if enough and c.on_generator_failures == "raise":
            raise RunError(
                f"{message}: as many as generation.max_consecutive_generator_failures; on_generator_failures = 'raise'"
            )
        message += f"; it is not asked before step {self._not_before}"
        self._say(f"warning: {message}, training goes on without it" if enough else message)

    def _metrics(self) -> Row:
        """Of this step; every name is there every time."""
        row: Row = {"tasks/size": len(self._store), "tasks/appended": 0}
        row |= {f"tasks/refused/{reason}": 0 for reason in Refused}
        row |= {f"generator/{self.name}/{name}": 0 for name in ("proposed", "admitted", "failures", "tokens")}
        row |= self._row
        row[f"generator/{self.name}/admitted"] = row["tasks/appended"]
        return row

    # ---- Checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        asked = self._asked
        return {
            "generator": self._state,
            "outcomes": self._outcomes.state_dict(),
            "asked": asked and [asked.step, asked.version, asked.num_tasks, asked.outcomes.state_dict()],
            "admitted": self._admitted,
            "prompts": self._prompts,
            "failures": self._failures,
            "not_before": self._not_before,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse. What was asked is asked again by `resume`."""
        self._state = state["generator"]
        self._outcomes.load_state_dict(state["outcomes"])
        self._generator.load_state_dict(self._state)
        if state["asked"] is not None:
            step, version, num_tasks, outcomes = state["asked"]
            self._asked = Asked(step, version, num_tasks, self._outcomes.snapshot())
            self._asked.outcomes.load_state_dict(outcomes)
        self._admitted, self._prompts = state["admitted"], state["prompts"]
        self._failures, self._not_before = state["failures"], state["not_before"]

    def close(self) -> None:
        """Nobody waits for the generator any more."""
        if self._call is not None:
            self._call.cancel()
