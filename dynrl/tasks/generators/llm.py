"""Base of generators that ask a language model over HTTP: concurrency, budget, and the same replies on a restart.

What a request is, and how it fails, is in `chat.py`; what is asked, in the generators.
"""

import asyncio
import math
import os
import re
import time
import warnings
from collections.abc import Coroutine, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from dynrl.tasks.generators.base import GeneratorContext, TaskGenerator

_CHECK_SECS = 0.1  # between looks at whether anybody waits for the proposals
_CLOSING_SECS = 0.5  # for cancelled requests to let go of their connections
_ENVIRONMENT_NAME = re.compile("[A-Z_][A-Z0-9_]*")


class Reply(NamedTuple):
    """What came of one prompt.

    `text` is None where nothing came, and `error` says why, in a line. `requests` counts the retries too; `tokens` are
    those of prompts and replies, over all these requests.
    """

    text: str | None
    error: str
    requests: int
    tokens: int


@dataclass
class Spending:
    """Requests made, and the tokens that they cost."""

    requests: int = 0
    tokens: int = 0


@dataclass(kw_only=True, eq=False)
class LLMGenerator(TaskGenerator):
    """Base of generators that ask a language model behind an OpenAI-compatible chat-completions API.

    A subclass calls `ask` in its `propose`. The budgets are for the whole run, and count every request: failed ones
    and retries included. Tokens count as the server reports them. Where nobody reports them, as after a timeout, a
    request counts as the most it may have cost: one token for each byte of the prompt, and `max_reply_tokens`. No
    request starts once either budget is used up; so that of tokens is exceeded by the requests then under way, at most
    `max_concurrency`.

    Attributes:
      base_url: of the API, such as `http://localhost:8000/v1`.
      model: the model's name at the server.
      max_requests: budget of HTTP requests.
      max_tokens: budget of tokens, prompts and replies together.
      api_key_env: name of the environment variable that holds the key; None for a server that asks for none.
      timeout_secs: of one request, from connecting to the reply's last byte.
      max_retries: further tries after a timeout, a lost connection, or HTTP status 408, 409, 429 or from 500 on. They
        wait for exponential backoff or as long as the header Retry-After says, whichever is longer; one that says more
        than 60 s, or ends beyond the deadline, is not waited for.
      max_concurrency: requests at a time.
      temperature: of the replies.
      max_reply_tokens: of one reply, its reasoning included.
      extra_body: further fields of every request, which have the last word; None leaves a field out. OpenAI's
        reasoning models take `{"max_tokens": None, "max_completion_tokens": 4096, "temperature": None}`.

    Raises:
      ImportError: the extra `llm` is not installed.
      ValueError: an argument is out of range, or the environment variable is not set.
    """

    base_url: str
    model: str
    max_requests: int
    max_tokens: int
    api_key_env: str | None = None
    timeout_secs: float = 60.0
    max_retries: int = 4
    max_concurrency: int = 8
    temperature: float = 1.0
    max_reply_tokens: int = 1024
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._spent = Spending()
        self._said_used_up = False
        if not isinstance(self.model, str) or not self.model:
            raise ValueError(f"model must be the name of a model at the server, got {self.model!r}")
        if not isinstance(self.extra_body, Mapping):
            raise ValueError(f"extra_body must be a mapping of request fields, got {self.extra_body!r}")
        for name in ("max_requests", "max_tokens", "max_concurrency", "max_reply_tokens"):
            check_number(name, getattr(self, name), int, 1)
        check_number("max_retries", self.max_retries, int, 0)
        check_number("temperature", self.temperature, float, 0)
        check_number("timeout_secs", self.timeout_secs, float, 0.001)
        self._chat.check_url(self.base_url)
        self._api_key()

    def num_affordable(self, num_requests: int) -> int:
        """How many times so many requests the budgets still allow. Warns, once, when not even once."""
        left = max(0, self.max_requests - self._spent.requests) if self._has_budget else 0
        if left < num_requests and not self._said_used_up:
            self._said_used_up = True
            warnings.warn(
                f"{type(self).__name__} proposes nothing more: its budget is used up, with {self._spent.requests} of "
                f"max_requests={self.max_requests} requests (the next proposal takes {num_requests}) and "
                f"{self._spent.tokens} of max_tokens={self.max_tokens} tokens",
                stacklevel=2,
            )
        return left // num_requests

    def ask(self, context: GeneratorContext, prompts: Mapping[str, str]) -> dict[str, Reply]:
        """Sends prompts, at most `max_concurrency` at a time, and waits for all replies.

        Each reply, or failure, is written down by `context.once` as it arrives, from the calling thread; one that was
        written down before a restart is not asked for again, and its cost counts. `context.spent` counts `requests`
        and `tokens`, `unanswered` prompts, and `unasked` ones, which the budget did not allow.

        Args:
          context: of the call of `propose`.
          prompts: by keys that are unique in this call of `propose`.

        Returns:
          Replies by key, in the order of the prompts, without those that the budget did not allow.

        Raises:
          Cancelled: nobody waits any more.
          RuntimeError: no prompt was answered; names the server, the model, the number of requests and the last error.
        """
        replies: dict[str, Reply] = {}
        for key in prompts:
            try:  # `once` writes nothing down where the call raises: this looks, and does not ask
                replies[key] = Reply(**context.once(key, _raise_unheard))
            except _Unheard:
                continue
            self._charge(context, replies[key].requests, replies[key].tokens)
        if unheard := {key: prompt for key, prompt in prompts.items() if key not in replies}:
            _run(self._hear(context, unheard, replies))
        replies = {key: replies[key] for key in prompts if key in replies}
        failed = [reply for reply in replies.values() if reply.text is None]
        count(context, "unanswered", len(failed))
        count(context, "unasked", len(prompts) - len(replies))
        if failed and len(failed) == len(replies):
            num_requests = sum(reply.requests for reply in failed)
            raise RuntimeError(
                f"{self.base_url}, model {self.model!r}: {num_requests} requests for {len(failed)} prompts, and no "
                f"answer; the last error: {failed[-1].error}"
            )
        return replies

    def state_dict(self) -> dict[str, Any]:
        """What is spent of the budgets."""
        return asdict(self._spent)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with what is left of the budgets."""
        self._spent = Spending(**state)

    async def _hear(self, context: GeneratorContext, prompts: Mapping[str, str], replies: dict[str, Reply]) -> None:
        places = asyncio.Semaphore(self.max_concurrency)
        async with self._chat.open_client(self.base_url, self._api_key()) as client:
            keys = {asyncio.create_task(self._hear_one(context, client, places, prompts[key])): key for key in prompts}
            waiting = set(keys)
            try:
                while waiting:
                    context.check()
                    done, waiting = await asyncio.wait(
                        waiting, timeout=_CHECK_SECS, return_when=asyncio.FIRST_COMPLETED
                    )
                    for task in done:
                        if reply := task.result():
                            replies[keys[task]] = Reply(**context.once(keys[task], reply._asdict))
            finally:
                for task in waiting:
                    task.cancel()
                if waiting:
                    await asyncio.wait(waiting, timeout=_CLOSING_SECS)

    async def _hear_one(
        self, context: GeneratorContext, client: Any, places: asyncio.Semaphore, prompt: str
    ) -> Reply | None:
        """The reply, after retries; None where the budgets did not allow a single request."""
        spent = Spending()
        prompt = prompt.encode("utf-8", "replace").decode()  # a lone surrogate is no text, and would not travel

        async def request() -> str:
            async with places:
                if not self._has_budget:
                    raise self._chat.ChatFailure("the budget is used up", tokens=0)
                spent.requests += 1
                self._charge(context, 1, 0)
                tokens = None
                try:
                    text, tokens = await self._chat.complete(client, self._body(prompt), self.timeout_secs)
                    return text
                except self._chat.ChatFailure as failure:
                    tokens = failure.tokens
                    raise
                finally:
                    tokens = len(prompt.encode()) + self.max_reply_tokens if tokens is None else tokens
                    spent.tokens += tokens
                    self._charge(context, 0, tokens)

        try:
            text = await self._chat.retrying(self.max_retries, context.deadline - time.monotonic())(request)
        except self._chat.ChatFailure as failure:
            return Reply(None, failure.line, spent.requests, spent.tokens) if spent.requests else None
        return Reply(text, "", spent.requests, spent.tokens)

    @property
    def _chat(self):
        from dynrl.tasks.generators import chat  # imported here: most runs do without the extra

        return chat

    @property
    def _has_budget(self) -> bool:
        return self._spent.requests < self.max_requests and self._spent.tokens < self.max_tokens

    def _charge(self, context: GeneratorContext, requests: int, tokens: int) -> None:
        self._spent.requests += requests
        self._spent.tokens += tokens
        count(context, "requests", requests)
        count(context, "tokens", tokens)

    def _body(self, prompt: str) -> dict[str, Any]:
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": self.temperature,
            "max_tokens": self.max_reply_tokens,
            **self.extra_body,
        }
        return {name: value for name, value in body.items() if value is not None}

    def _api_key(self) -> str:
        """Read when it is needed and never kept, so that no state, copy or message can hold it."""
        if self.api_key_env is None:
            return "no-key"
        if not isinstance(self.api_key_env, str) or not _ENVIRONMENT_NAME.fullmatch(self.api_key_env):
            raise ValueError(
                "api_key_env must be the name of an environment variable, in capitals, such as OPENAI_API_KEY; what it "
                "is set to is no such name and is not shown, since it could be the key itself"
            )
        key = os.environ.get(self.api_key_env, "").strip()
        if not key:
            raise ValueError(f"api_key_env names the environment variable {self.api_key_env}, which is not set")
        if not key.isascii() or not key.isprintable():
            raise ValueError(f"the environment variable {self.api_key_env} holds characters that no key has")
        return key


def count(context: GeneratorContext, name: str, number: int) -> None:
    """Adds to what `context.spent` holds for the metrics."""
    if number:
        context.spent[name] = context.spent.get(name, 0) + number


def check_number(name: str, value: Any, kind: type[int] | type[float], low: float, high: float = math.inf) -> None:
    """Raises ValueError, naming the argument, for what is no finite number of the kind in [low, high]."""
    kinds = (int, float) if kind is float else (int,)
    if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value) or not low <= value <= high:
        what = "a whole number" if kind is int else "a number"
        bounds = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
        raise ValueError(f"{name} must be {what} {bounds}, got {value!r}")


def _run(coroutine: Coroutine[Any, Any, None]) -> None:
    # asyncio.run would wait at its end for the thread that looks up a host's name, and that knows no deadline.
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(coroutine)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


class _Unheard(Exception):
    """Nothing was written down for this prompt."""


def _raise_unheard() -> None:
    raise _Unheard
