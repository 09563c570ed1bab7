"""The path of the data, in order.

    tasks -> selector -> sampler -> reward -> group filter -> backfill -> batch -> train step -> checkpoint
      ^                                            |
      |------------- task generator <--- outcomes -+

The controller decides; this loop does what it says and tells it what happened. The producer holds the middle of the
path: it runs dispatched groups through sampler, verifiers and filter, and puts the kept ones into the buffer.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from dynrl.bookkeeping import Bookkeeper, run_name
from dynrl.build import Parts, build, describe, run_warm_start, warm_up
from dynrl.config import RunConfig, from_mapping
from dynrl.evaluation import Evaluation
from dynrl.generation import Generation
from dynrl.interrupt import Interrupt
from dynrl.journal import Journal
from dynrl.metrics import JsonlWriter, MetricWriter, Row
from dynrl.models.sharding import any_process
from dynrl.results import RunError, RunResult, summarise
from dynrl.rollout.controller import apply, initial_state
from dynrl.rollout.events import (
    Cancel,
    Command,
    Dispatch,
    Draw,
    Drawn,
    Event,
    Free,
    Resumed,
    Retry,
    StepTrained,
    Stop,
    StopRequested,
    TasksDrawn,
    Train,
    Warn,
)  # fmt: skip
from dynrl.rollout.ledger import Phase
from dynrl.rollout.side_rollouts import SideRollouts
from dynrl.tasks.self_propose import FIRST_ID
from dynrl.tasks.verifiers import VerifierPoolError
from dynrl.types import Outcome
from dynrl.watchdog import Watchdog
from dynrl.workdir import WorkdirError, open_workdir


def run(
    config: Any, workdir: str, callbacks: Sequence[MetricWriter] = (), build_parts: Callable[[RunConfig], Parts] = build
) -> RunResult:
    """Runs a configuration to its end, or resumes it from the newest checkpoint in `workdir`.

    Args:
      config: a RunConfig, a ConfigDict or a nested mapping.
      workdir: takes metrics.jsonl, tensorboard/, checkpoints/ and config.json; a local path or gs://.
      callbacks: further metric writers.
      build_parts: makes the parts; for those who exchange one.

    Raises:
      ConfigError: naming the key, for a configuration that cannot work or differs from the one being resumed.
      RunError: when a budget is used up, the verifiers' pool cannot go on, or the workdir cannot be had.
    """
    config = config if isinstance(config, RunConfig) else from_mapping(config)
    with (
        _run_errors(),
        Interrupt() as interrupt,
        closing(build_parts(config)) as parts,
        open_workdir(workdir, jax.process_index() == 0) as path,
    ):
        loop = Loop(parts, path, callbacks, interrupt)
        with closing(loop.books), closing(loop), loop.watchdog:
            reason = loop.train()
            interrupt.restore()
            return loop.result(reason)


@contextmanager
def _run_errors() -> Iterator[None]:
    """What a part found that the run cannot go on without, as a RunError."""
    try:
        yield
    except (VerifierPoolError, WorkdirError) as error:
        raise RunError(str(error)) from error


class Training(NamedTuple):
    """A step at the trainer, and what its row will say of how it was filled."""

    metrics: Any  # on the devices
    counts: dict[str, int]  # the controller's totals
    surplus: int
    since_poll: int


class Loop:
    """One run: the parts, the controller's state, and the books."""

    def __init__(
        self, parts: Parts, workdir: epath.Path, callbacks: Sequence[MetricWriter], interrupt: Interrupt
    ) -> None:  # fmt: skip
        self._begin = time.perf_counter()
        self._workdir = workdir
        self.parts, self.config = parts, parts.config
        self.controller = initial_state(parts.config)
        self.books = Bookkeeper(parts, self.controller, workdir, callbacks)
        budget = self.config.rollout_failure
        self.watchdog = Watchdog(budget.stall_secs, budget.on_stall == "stop", self.books.progress.say)
        journal = Journal(workdir, jax.process_index(), run_name(self.config))
        parts.producer.deadlines.journal = parts.player.journal = journal
        self._interrupt = interrupt  # of this process
        self._stopping = False  # any process, as all of them know
        self._queue: deque[Command] = deque()  # what the controller has commanded
        self._training: Training | None = None  # the step that is at the trainer
        self._training_since: float | None = None
        rollouts = SideRollouts(
            parts.player, parts.verifiers, parts.tokenizer, journal,
            lambda groups: self._advance(*parts.producer.receive(groups)), parts.producer.collect, self._progress,
        )  # fmt: skip
        self._evaluation = Evaluation(self.config, parts.eval_tasks, rollouts)
        self._generation = None
        if parts.make_generator is not None:
            self._generation = Generation(
                self.config, parts.make_generator, parts.store, parts.source, parts.proposals, rollouts,
                parts.tokenizer, journal, self.books.progress.say,
            )  # fmt: skip
            self.books.keep(self._generation)
        self._start()
        self._step_begin = time.perf_counter()

    def _start(self) -> None:
        """Warm start (of a new run), compilation, and the first evaluation."""
        parts, say = self.parts, self.books.progress.say
        for line in describe(parts):
            say(line)
        self._check_interrupt()
        if self.books.resumed:
            say(f"resuming at step {self.controller.step} of {self.config.num_steps}")
            if self.books.grown and self.config.train.lr_schedule != "constant":
                say(f"num_steps grew: train.lr_schedule = {self.config.train.lr_schedule!r} now decays to its new end")
        elif self.config.warm_start.num_steps:
            self._warm_start()
        self._check_interrupt()
        compiles, begin = parts.compiles.count, time.perf_counter()
        warm_up(parts)
        say(f"compiled {parts.compiles.count - compiles} programs in {time.perf_counter() - begin:.1f} s")
        self._check_interrupt()
        self._resumed_in_flight = self.books.restore_in_flight()
        if not self._resumed_in_flight:
            parts.publish(self.controller.version)
            self.books.sampler_counters = parts.sampler.counters
        if not self.books.resumed:
            self.books.add_row({"run/step": 0, "run/version": 0, **self._evaluate()})
        parts.compiles.start()
        self._check_interrupt()

    def _check_interrupt(self) -> None:
        """Ends set-up, on all processes, when one was interrupted."""
        if any_process(self._interrupt.requested):
            raise KeyboardInterrupt

    def _warm_start(self) -> None:
        say, begin = self.books.progress.say, time.perf_counter()
        writers: list[JsonlWriter] = []  # opened when there is something to write: a cached warm start leaves the file

        def log(step: int, loss: float) -> None:
            self._check_interrupt()
            say(f"warm start {step}/{self.config.warm_start.num_steps} loss {loss:.3f}")
            if jax.process_index() == 0:
                if not writers:
                    writers.append(JsonlWriter(self._workdir / "warm_start.jsonl"))
                writers[0].write(step, {"warm_start/step": step, "warm_start/loss": loss})

        cached = run_warm_start(self.parts, log)
        say(f"warm start {'read from the cache' if cached else 'trained'} in {time.perf_counter() - begin:.1f} s")

    def train(self) -> str:
        """Follows the controller to its Stop, and returns the reason."""
        if self._generation is not None:
            self._generation.resume()
        self._advance(Resumed(self._resumed_in_flight))
        if not self._resumed_in_flight and self.parts.self_propose is not None:
            self.parts.self_propose.drop()  # as the controller does with their groups
        if self._resumed_in_flight:  # a retry may have been commanded and not yet heard of
            running = self.controller.ledger.in_order(Phase.IN_FLIGHT)
            self.parts.producer.dispatch(self.parts.producer.unknown(running))
        while True:
            if not self._queue:
                if self._training is not None and self._step_is_over(self._training):
                    self._finish_step(self._training)
                elif self.parts.producer.idle:
                    raise RuntimeError(f"the controller waits in step {self.controller.step}, and nothing is under way")
                else:
                    self._produce()
                continue
            match self._queue.popleft():
                case Draw(num):
                    self._advance(self._draw(num))
                case Dispatch(tickets):
                    self.parts.producer.dispatch(tickets)
                case Retry(ticket, delay_secs):
                    self.parts.producer.retry(ticket, delay_secs)
                case Cancel(tickets):
                    self.parts.producer.cancel(tickets)
                case Train(tickets, note):
                    if note:
                        self.books.progress.say(note)
                    self._training = self._begin_step(tickets)
                    if not self.controller.overlaps:
                        self._finish_step(self._training)
                case Warn(message):
                    self.books.progress.say(message)
                case Stop(reason, failed):
                    return self._stop(reason, failed)

    def _advance(self, *events: Event) -> None:
        """Tells the controller what happened, and queues what it answers. What it frees is freed at once."""
        for event in events:
            self.controller, commands = apply(self.controller, event)
            for command in commands:
                if isinstance(command, Free):
                    self.parts.statistics.freed(self.parts.buffer.records(command.tickets))
                    self.parts.buffer.free(command.tickets)
                else:
                    self._queue.append(command)

    def _draw(self, num: int) -> TasksDrawn:
        """Tasks -> selector."""
        parts = self.parts
        proposer = parts.self_propose
        prompts = [] if proposer is None else proposer.draw(num, self.controller.filling)
        draws = parts.selection.draw(num - len(prompts), parts.store)
        ids = [*prompts, *(draw.task_id for draw in draws)]
        visits = [0] * len(prompts) + parts.visits.next_visits(ids[len(prompts) :])  # each prompt is drawn once
        sources = [task.source for task in (proposer or parts.store).get(ids)]
        base = [False] * len(prompts) + [draw.base for draw in draws]
        return TasksDrawn(tuple(map(Drawn, ids, visits, sources, base)), num)

    def _produce(self) -> None:
        """Selector -> sampler -> reward -> group filter -> buffer; the selector learns of every judged group."""
        if not self.controller.overlaps:
            self._await_weights()
        events = self.parts.producer.poll()
        if events:
            self._progress()
        elif self.watchdog.ends and any_process(bool(self.watchdog.stalled)):
            raise RunError(f"{self.watchdog.stalled or 'another process made no progress'}; on_stall = 'stop'")
        self._advance(*events)
        under_way = self.controller.ledger.open[Phase.IN_FLIGHT]
        outcomes: list[Outcome] = []
        for groups in self.parts.producer.take_judged():
            retried_N = np.array([t.ticket in under_way for t in groups.tickets], bool)
            if retried_N.any():  # attempts that are made again: the group is counted when it has its verdict
                self.parts.statistics.retried(groups.rows(retried_N))
                groups = groups.rows(~retried_N)
            self.parts.statistics.judged(groups)
            outcomes += groups.outcomes()
        skipped = self.parts.producer.take_skipped()
        self.parts.statistics.skipped(len(skipped))
        self._observe([*outcomes, *skipped])

    def _observe(self, outcomes: Sequence[Outcome]) -> None:
        """Selector and generator learn what became of groups."""
        proposer = self.parts.self_propose
        for outcome in outcomes:
            if outcome.task_id >= FIRST_ID:
                continue  # the proposer's own prompts do not come again
            self.parts.selection.observe(outcome)
            if proposer is not None:
                proposer.observe(outcome)
        if self._generation is not None:
            self._generation.observe_all(outcomes)

    def _progress(self) -> None:
        """Something happened, as the watchdog will remember it."""
        levels = {p.value: self.controller.ledger.level(p) for p in Phase}
        self.watchdog.progress(f"step {self.controller.step}, groups {levels}")

    def _begin_step(self, tickets: tuple[int, ...]) -> "Training":
        """Buffer -> batch -> train step."""
        self._await_weights()  # a step that surplus fills follows the step before at once
        parts, step = self.parts, self.controller.step
        surplus = self.controller.ledger.level(Phase.READY)
        parts.statistics.trained(parts.buffer.records(tickets), step, step * self.config.versions_per_step)
        self._training_since = time.perf_counter()
        parts.state, metrics = parts.train_step(parts.state, parts.buffer.take(tickets))
        parts.buffer.free(tickets)
        return Training(metrics, dict(self.controller.totals), surplus, parts.producer.num_polls)

    def _step_is_over(self, training: "Training") -> bool:
        """Whether the new weights are published now, where groups are generated while a step is trained."""
        producer, schedule = self.parts.producer, self.config.schedule
        if producer.idle:
            return True
        if schedule.clock == "logical":
            return producer.num_polls - training.since_poll >= schedule.chunks_per_update
        return not any_process(not self.parts.state.updates.is_ready())

    def _finish_step(self, training: "Training") -> None:
        """Weights to the sampler -> row, evaluation, checkpoint."""
        self._training = None
        self._progress()
        parts, step = self.parts, self.controller.step
        version = (step + 1) * self.config.versions_per_step
        parts.publish(version)
        self._advance(StepTrained(version))
        totals, rates = self.controller.ledger.totals(), self.controller.keep_rate
        row = parts.statistics.row(totals, training.counts, rates, training.surplus)
        row |= {"run/step": step + 1, "run/version": version, **self._sampler_row()}
        if parts.self_propose is not None:
            parts.self_propose.keep(
                t.task_id for tickets in self.controller.ledger.open.values() for t in tickets.values()
            )
            row |= parts.self_propose.row()
        self.books.add_row(row, training.metrics)
        self._generate()
        every = self.config.evaluation.every_steps
        if every and (step + 1) % every == 0:
            self._await_weights()
            self.books.amend(self._evaluate())
        self._check_faults()
        if (step + 1) % self.config.checkpoint.every_steps == 0:
            self._await_weights()  # the checkpoint's copy of the row is whole
            self.books.save()
        self._stopping = any_process(self._interrupt.requested)
        if self._stopping and not self.controller.stopped:
            self._queue.clear()
            self._advance(StopRequested("interrupted"))

    def _await_weights(self) -> None:
        """Waits for the train step, which the sampler would wait for anyway, to know what each phase takes."""
        if self._training_since is None:
            return
        jax.block_until_ready(self.parts.state.updates)
        now = time.perf_counter()
        secs = {f"time/{name}_secs": value for name, value in self.parts.producer.take_secs().items()}
        secs["time/train_step_secs"] = now - self._training_since
        self.books.amend({**secs, "time/step_secs": now - self._step_begin})
        self._training_since, self._step_begin = None, now

    def _sampler_row(self) -> Row:
        """What the sampler did for the step."""
        before, now = self.books.sampler_counters, self.parts.sampler.counters
        tokens, slot_steps = (now[k] - before[k] for k in ("tokens", "slot_steps"))
        self.books.sampler_counters = now
        self.books.generated_tokens += tokens
        secs = self.parts.producer.secs["sampler"]
        return {
            "sampler/tokens": tokens,
            "sampler/tokens_per_sec": tokens / secs if secs else None,
            "sampler/slot_utilisation": tokens / slot_steps if slot_steps else None,
            "run/generated_tokens": self.books.generated_tokens,
        }

    def _evaluate(self) -> Row:
        """Frozen tasks -> sampler -> reward."""
        return self._aside("evaluation", lambda: self._evaluation(self.controller.step))[0]

    def _generate(self) -> None:
        """Outcomes -> task generator -> tasks."""
        generation, state = self._generation, self.controller
        if generation is None:
            return
        if generation.is_due(state.step):
            self._await_weights()
        counts = self.config.generation.selectable_below > 0  # which costs time
        selectable = self.parts.selection.num_selectable(self.parts.store) if counts else None
        rate = state.keep_rate.expected
        row, tokens = self._aside("generation", lambda: generation.step(state.step, state.version, rate, selectable))
        self.books.amend(row)
        self.books.generated_tokens += tokens
        self._observe(generation.take_probed())

    def _aside(self, name: str, work: Callable[[], tuple[Row, int]]) -> tuple[Row, int]:
        """Does what is no part of a step, and keeps its tokens and its time out of the step's account."""
        parts, begin = self.parts, time.perf_counter()
        before = parts.sampler.counters
        row, tokens = work()
        made = {k: v - before[k] for k, v in parts.sampler.counters.items()}
        self.books.sampler_counters["tokens"] += tokens
        self.books.sampler_counters["slot_steps"] += made["slot_steps"] * tokens // max(made["tokens"], 1)
        spent = time.perf_counter() - begin
        self._step_begin = getattr(self, "_step_begin", begin) + spent
        return {**row, f"time/{name}_secs": spent}, tokens

    def _check_faults(self) -> None:
        """What must not happen quietly: programs compiled after warm-up, gradients that are not finite."""
        compiles = self.parts.compiles
        self.books.amend({"run/recompiles": compiles.count})
        if self.config.fail_on_recompile and any_process(compiles.count > 0):
            names = ", ".join(compiles.names) or "on another process"
            raise RunError(f"{compiles.count} programs compiled after warm-up: {names}")
        self._check_nonfinite(self.config.train.max_nonfinite_updates)

    def _check_nonfinite(self, limit: int) -> None:
        """Counts what was fetched: all but the last step's, before the end."""
        if self.books.nonfinite_updates > limit:
            raise RunError(
                f"{self.books.nonfinite_updates} updates had a non-finite gradient and were skipped, more than "
                f"train.max_nonfinite_updates = {limit}; train_step/* of the last rows show where it began"
            )

    def _stop(self, reason: str, failed: bool) -> str:
        """The last evaluation and checkpoint; a failed run keeps its last checkpoint and raises."""
        self._await_weights()
        if failed:
            self.parts.producer.cancel_all()
            self.books.flush()
            statuses = ", ".join(f"{n} {status}" for status, n in self.parts.statistics.statuses().items())
            notes = [f"rollouts by status: {statuses or '-'}"]
            notes += [f"verifier: {e}" for pool in self.parts.pools for e in pool.errors()[-3:]]
            notes += [f"warning: {w}" for w in self.parts.warnings]
            raise RunError("\n".join([reason, *notes]))
        pending = self.books.pending()
        self._check_nonfinite(self.config.train.max_nonfinite_updates)
        if pending is not None and "eval/main/pass_at_1" not in pending and not self._stopping:
            self.books.amend(self._evaluate())
        self.books.save()
        self.books.flush()
        self.parts.producer.cancel_all()
        return reason

    def close(self) -> None:
        """Lets the generator go."""
        if self._generation is not None:
            self._generation.close()

    def result(self, reason: str) -> RunResult:
        """Results, and the last lines of the run."""
        parts, rows = self.parts, self.books.rows()
        steps = f"{self.controller.step} of {self.config.num_steps}"
        summary = summarise(rows, self._workdir, reason, steps, self.books.generated_tokens, self._begin)
        for line in summary:
            self.books.progress.say(line)
        return RunResult(parts.state.params, rows, parts.sampler, parts.tokenizer, reason, summary)
