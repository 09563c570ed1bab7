"""From a record of a data file to a task: which fields, of what type. Errors name the field, not the file."""

import math
import string
from collections.abc import Mapping, Sequence
from typing import Any

from dynrl.tasks.admission import json_copy
from dynrl.tasks.base import near
from dynrl.types import Task


class Fields:
    r"""How the fields of a record become a task.

    Args:
      prompt: a field's name, or a template such as `"Question: {question}\nAnswer:"`; `{{` is a brace.
      answer: a field's name, or a template.
      level: the field that holds the difficulty, a whole number; None where all have level 0.
      metadata: fields that go into the task's metadata under their own names.
      source: the tasks' source.

    Raises:
      TypeError, ValueError: an argument is of another type, or a template is malformed.
    """

    def __init__(self, prompt: str, answer: str, level: str | None, metadata: Sequence[str], source: str):
        if isinstance(metadata, str) or not all(isinstance(name, str) for name in metadata):
            raise TypeError(f"metadata must be a sequence of field names, got {metadata!r}")
        if not isinstance(source, str) or not source:
            raise TypeError(f"source must be a non-empty text, got {source!r}")
        self._prompt = _template("prompt", prompt)
        self._answer = _template("answer", answer)
        self._level = level
        self._metadata = tuple(metadata)
        self._source = source

    @property
    def names(self) -> tuple[str, ...]:
        """All fields that are read, each once."""
        templates = [name for _, name in (*self._prompt, *self._answer) if name is not None]
        return tuple(dict.fromkeys([*templates, *([self._level] if self._level else []), *self._metadata]))

    def task(self, record: Mapping[str, Any]) -> Task:
        """Returns the record's task, with task_id -1.

        Raises:
          ValueError: a field is missing or of the wrong type, the prompt is blank, or a text is none.
        """
        prompt, answer = _filled(self._prompt, record), _filled(self._answer, record)
        if not prompt.strip():
            raise ValueError("the prompt is empty")
        for what, text in (("prompt", prompt), ("answer", answer)):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"the {what} holds a lone surrogate, which is no text: {error.reason}") from None
        metadata = {name: _metadata(record, name) for name in self._metadata}
        level = 0 if self._level is None else _level(record, self._level)
        return Task(-1, self._source, prompt, answer, level, metadata=metadata)


def _template(what: str, text: Any) -> list[tuple[str, str | None]]:
    """Returns literal texts, each with the field that follows it."""
    if not isinstance(text, str) or not text:
        raise TypeError(f"{what} must be a field's name or a template, got {text!r}")
    if "{" not in text and "}" not in text:
        return [("", text)]
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"bad template for {what}, {text!r}: {error}") from None
    for _, name, spec, conversion in parts:
        if name is not None and (not name or spec or conversion or set(name) & set(".[]")):
            raise ValueError(f"bad template for {what}, {text!r}: only plain fields such as {{question}} can be named")
    if all(name is None for _, name, _, _ in parts):
        raise ValueError(f"bad template for {what}, {text!r}: it names no field")
    return [(literal, name) for literal, name, _, _ in parts]


def _filled(template: Sequence[tuple[str, str | None]], record: Mapping[str, Any]) -> str:
    return "".join(literal + ("" if name is None else _text(record, name)) for literal, name in template)


def _text(record: Mapping[str, Any], name: str) -> str:
    value = _value(record, name)
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    raise ValueError(f"field {name!r} must be a text or a number, got {_kind(value)}")


def _level(record: Mapping[str, Any], name: str) -> int:
    value = _value(record, name)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError(f"field {name!r}, the level, must be a whole number, got {_kind(value)}")


def _metadata(record: Mapping[str, Any], name: str) -> Any:
    try:
        return json_copy(_value(record, name))
    except TypeError as error:
        raise ValueError(f"field {name!r}, which goes into the metadata: {error}") from None


def _value(record: Mapping[str, Any], name: str) -> Any:
    if name not in record:
        raise ValueError(f"there is no field {name!r}{near(name, record)}; there are {', '.join(record) or 'none'}")
    return record[name]


def _kind(value: Any) -> str:
    return "nothing (null)" if value is None else f"{type(value).__name__} {value!r:.60}"
