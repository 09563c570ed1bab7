"""One request to a chat-completions API, by the package openai (extra `llm`): a text, or a failure in a line.

The client's own retries are off: it does not say how many it made, and each counts against a budget. Whatever the
server does, nothing but a `ChatFailure` comes of it, in bounded time and memory, and none holds the key.
"""

import asyncio
import email.utils
import functools
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

try:
    import httpx2
    import openai
    import tenacity
except ImportError as error:
    raise ImportError("generators that ask a language model need more packages: pip install 'dynrl[llm]'") from error

MAX_REPLY_BYTES = 4 << 20
MAX_RETRY_AFTER_SECS = 60.0

_FIRST_BACKOFF_SECS = 0.5
_MAX_BACKOFF_SECS = 30.0
_MAX_LINE_CHARS = 300


class ChatFailure(Exception):
    """A request without an answer.

    Attributes:
      line: what went wrong, on one line, without the key.
      tokens: what the request cost; None where nobody knows.
      pause_secs: at least so long before another try; None where another try is of no use.
    """

    def __init__(self, line: str, tokens: int | None = None, pause_secs: float | None = None) -> None:
        super().__init__(line)
        self.line = line
        self.tokens = tokens
        self.pause_secs = pause_secs


def check_url(base_url: Any) -> None:
    """Raises ValueError, naming the argument, for what is no URL, or one that holds what messages must not show."""
    what = "base_url must be a URL such as http://localhost:8000/v1"
    if isinstance(base_url, str) and set("@?") & set(base_url):
        raise ValueError(f"{what}, without user name, password or query: messages show it. Keys are api_key_env's")
    try:
        url = httpx2.URL(base_url)
    except (httpx2.InvalidURL, TypeError, ValueError) as error:
        raise ValueError(f"{what}, got {base_url!r}: {error}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"{what}, got {base_url!r}")


def open_client(base_url: str, api_key: str) -> openai.AsyncOpenAI:
    """A client, to be closed by `async with`."""
    return openai.AsyncOpenAI(
        base_url=base_url,
        api_key=api_key,
        max_retries=0,
        timeout=None,  # it would limit each read; `complete` limits the whole
        default_headers={"Accept-Encoding": "identity"},  # a few compressed bytes can be a gigabyte
        # Redirects would be requests that nobody counts.
        http_client=openai.DefaultAsyncHttpx2Client(event_hooks={"response": [_bound]}, follow_redirects=False),
    )


async def complete(client: openai.AsyncOpenAI, body: Mapping[str, Any], timeout_secs: float) -> tuple[str, int | None]:
    """Makes one request.

    Args:
      client: of `open_client`.
      body: the request's fields.
      timeout_secs: from connecting to the reply's last byte.

    Returns:
      The text, and the tokens of prompt and reply; None where the server does not say.

    Raises:
      ChatFailure: no answer.
    """
    failure = functools.partial(_failure, client.api_key)
    try:
        async with asyncio.timeout(timeout_secs):
            response = await client.post("/chat/completions", cast_to=httpx2.Response, body=body)
    except TimeoutError:
        raise failure(f"no reply within {timeout_secs} s", pause_secs=0.0) from None
    except openai.APIStatusError as error:
        pause_secs = _pause_secs(error.status_code, error.response.headers)
        raise failure(f"HTTP {error.status_code}: {error.response.text}", 0, pause_secs) from None
    except openai.APIConnectionError as error:
        cause = error.__cause__ or error
        tokens = 0 if isinstance(cause, httpx2.ConnectError) else None
        pause_secs = None if isinstance(cause, UnusableReply) else 0.0
        raise failure(f"{type(cause).__name__}: {cause}", tokens, pause_secs) from None
    except Exception as error:  # what else the client lets through differs with its version
        raise failure(f"{type(error).__name__}: {error}") from None
    return _read(response, failure)


def _failure(api_key: str, line: str, tokens: int | None = None, pause_secs: float | None = None) -> ChatFailure:
    line = " ".join(line.replace(api_key, "[key]").split())
    return ChatFailure(line[:_MAX_LINE_CHARS], tokens, pause_secs)


def _read(response: httpx2.Response, failure: Callable[..., ChatFailure]) -> tuple[str, int | None]:
    try:
        reply = json.loads(response.content.decode())
    except (ValueError, RecursionError) as error:
        raise failure(f"no chat completion, but {type(error).__name__}: {error}: {response.text}") from None
    tokens = _num_tokens(reply)
    try:
        choice = reply["choices"][0]
        text, is_cut_off = choice["message"]["content"], choice.get("finish_reason") == "length"
    except (LookupError, TypeError, AttributeError):
        raise failure(f"no chat completion, but {response.text}", tokens) from None
    if is_cut_off:
        raise failure("the reply was cut off at its longest (max_reply_tokens)", tokens)
    if not isinstance(text, str) or not text.strip():
        raise failure(f"no text in the reply: {response.text}", tokens)
    return text, tokens


def retrying(max_retries: int, max_secs: float) -> tenacity.AsyncRetrying:
    """Retries after a `ChatFailure`, where that may help, with exponential backoff or the server's own pause.

    Args:
      max_retries: tries after the first.
      max_secs: no try starts later than this.
    """
    jitter = tenacity.wait_random(0, _FIRST_BACKOFF_SECS)
    backoff = tenacity.wait_exponential(_FIRST_BACKOFF_SECS, _MAX_BACKOFF_SECS) + jitter

    def pause_secs(state: tenacity.RetryCallState) -> float:
        failure = state.outcome.exception() if state.outcome else None
        return max(backoff(state), getattr(failure, "pause_secs", None) or 0.0)

    return tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception(lambda error: getattr(error, "pause_secs", None) is not None),
        wait=pause_secs,
        stop=tenacity.stop_after_attempt(max_retries + 1) | tenacity.stop_before_delay(max_secs),
        reraise=True,
    )


class UnusableReply(httpx2.DecodingError):
    """A body that is not read to its end; of a kind that the client takes for an error of the connection."""


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for chunk in self._stream:
            num_bytes += len(chunk)
            if num_bytes > MAX_REPLY_BYTES:
                raise UnusableReply(f"the reply is longer than {MAX_REPLY_BYTES >> 20} MiB")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


async def _bound(response: httpx2.Response) -> None:
    """Limits the body, before it is read."""
    encoding = response.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise UnusableReply(f"the reply is compressed ({encoding}), which the request had ruled out")
    response.encoding = "utf-8"  # which JSON is; another that the server names could be a decompressor
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    response.stream = _BoundedStream(response.stream)


def _num_tokens(reply: Any) -> int | None:
    usage = reply.get("usage") if isinstance(reply, dict) else None
    tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
    return tokens if isinstance(tokens, int) and tokens >= 0 else None


def _pause_secs(status: int, headers: Mapping[str, str]) -> float | None:
    if status not in (408, 409, 429) and status < 500:
        return None
    value = headers.get("retry-after", "0")
    try:
        secs = float(value)
    except ValueError:
        try:
            secs = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, OverflowError):
            secs = 0.0
    return max(secs, 0.0) if secs <= MAX_RETRY_AFTER_SECS else None  # neither is true of NaN
