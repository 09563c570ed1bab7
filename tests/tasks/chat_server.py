"""A server on loopback that speaks the chat-completions protocol, and misbehaves as its script says."""

import json
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ChatServer:
    """Answers each request with what `script(prompt, number)` returns: an action, or the text of a reply.

    `prompts`, `bodies`, `headers` and `times` are of the requests in the order of their arrival; `max_at_once` counts
    those that were open together. What the script raises, `close` raises.
    """

    def __init__(self, script):
        self.script = script
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.errors: list[Exception] = []
        self.max_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()
        self._http = _HTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"chat": self}))
        self._http.errors = self.errors
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def base_url(self):
        return f"http://127.0.0.1:{self._http.server_port}/v1"

    @property
    def prompts(self):
        return [body["messages"][0]["content"] for body in self.bodies]

    def close(self):
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
        if self.errors:
            raise self.errors[0]

    def enter(self, body, headers):
        with self._lock:
            self.bodies.append(body)
            self.headers.append(headers)
            self.times.append(time.monotonic())
            self._at_once += 1
            self.max_at_once = max(self.max_at_once, self._at_once)
            return len(self.bodies) - 1

    def leave(self):
        with self._lock:
            self._at_once -= 1


class _HTTPServer(ThreadingHTTPServer):
    errors: list[Exception]
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request, client_address):
        error = sys.exc_info()[1]
        if isinstance(error, Exception) and not isinstance(error, ConnectionError):  # of a client that went away
            self.errors.append(error)


class _Handler(BaseHTTPRequestHandler):
    chat: ChatServer
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/chat/completions"
        number = self.chat.enter(body, {name.lower(): value for name, value in self.headers.items()})
        try:
            action = self.chat.script(body["messages"][0]["content"], number)
            (say(action) if isinstance(action, str) else action)(self)
        finally:
            self.chat.leave()

    def log_message(self, format, *args):
        pass


def say(text, total_tokens: Any = 10, secs=0.0, finish_reason="stop"):
    """A completion with this text."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    usage = {} if total_tokens is None else {"usage": {"total_tokens": total_tokens}}
    return send(json.dumps({"id": "x", "object": "chat.completion", "choices": [choice], **usage}).encode(), secs=secs)


def send(content, status=200, headers=(), secs=0.0):
    """Any bytes with any status, after a while."""

    def act(handler):
        time.sleep(secs)
        handler.send_response(status)
        for name, value in dict({"Content-Type": "application/json"}, **dict(headers)).items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    return act


def drip(secs):
    """A reply that never ends: a byte now and then, so that no single read takes long."""

    def act(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000000")
        handler.end_headers()
        for _ in range(int(secs / 0.02)):
            handler.wfile.write(b" ")
            time.sleep(0.02)
        handler.close_connection = True

    return act


def pour(handler):
    """A gigabyte, as long as somebody reads it."""
    handler.send_response(200)
    handler.send_header("Content-Length", str(1 << 30))
    handler.end_headers()
    for _ in range(1 << 10):
        handler.wfile.write(bytes(1 << 20))


def drop(handler):
    """The connection is closed within a reply."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    hang_up(handler)


def hang_up(handler):
    """The connection is closed without a reply."""
    handler.wfile.flush()
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True
