"""Wrong data files: each is refused at the start, with the file and the line, and what is wrong there."""

import gzip
import json
import re
import sys

import pytest

from dynrl.tasks.files import MAX_LINE_BYTES
from dynrl.tasks.sources import make_source

GOOD = b'{"prompt": "1+1=", "answer": "2", "level": 1}\n'

# Contents; the message after "PATH"; arguments.
BAD_JSONL = {
    "not_json": (GOOD + b"prompt: 1\n", ", line 2: invalid JSON at character 1: Expecting value", {}),
    "trailing_comma": (b'{"prompt": "a",}\n', ", line 1: invalid JSON at character 16: Illegal trailing comma", {}),
    "single_quotes": (
        GOOD + GOOD + b"{'prompt': 'a'}\n",
        ", line 3: invalid JSON at character 2: Expecting property",
        {},
    ),
    "two_objects": (GOOD.strip() + GOOD, ", line 1: invalid JSON at character 46: Extra data", {}),
    "csv": (b"prompt,answer\n1+1=,2\n", ", line 1: invalid JSON at character 1: Expecting value", {}),
    "nan": (b'{"prompt": "a", "answer": NaN}\n', ", line 1: invalid JSON: NaN is no number", {}),
    "huge_integer": (b'{"prompt": "a", "answer": ' + b"9" * 5_000 + b"}\n", ", line 1: Exceeds the limit", {}),
    "deep": (b"[" * 100_000 + b"]" * 100_000 + b"\n", ", line 1: invalid JSON: it is nested too deeply", {}),
    "array_on_a_line": (GOOD + b'["a", "b"]\n', ", line 2: expected an object, got list ['a', 'b']", {}),
    "number_on_a_line": (GOOD + b"3\n", ", line 2: expected an object, got int 3", {}),
    "null_on_a_line": (GOOD + b"\n\nnull\n", ", line 4: expected an object, got NoneType None", {}),
    "pretty_printed_array": (
        b'[\n  {"prompt": "a", "answer": "b"}\n]\n',
        ", line 1: invalid JSON at character 3: Expecting value; JSON Lines has one object on each line",
        {},
    ),
    "pretty_printed_object": (
        b'{\n  "prompt": "a"\n}\n',
        ", line 1: invalid JSON at character 3: Expecting property name enclosed in double quotes; JSON Lines has one",
        {},
    ),
    "cut_off": (
        GOOD + GOOD[:20],
        ", line 2: invalid JSON at character 20: Unterminated string starting at; the file may be cut off",
        {},
    ),
    "invalid_utf8": (
        GOOD + '{"prompt": "é", "answer": "1"}\n'.encode("latin-1"),
        ", line 2: invalid UTF-8 at byte 13 of the line: invalid continuation byte",
        {},
    ),
    "utf16": (GOOD.decode().encode("utf-16"), ", line 1: invalid UTF-8 at byte 1 of the line: invalid start byte", {}),
    "byte_order_mark": (b"\xef\xbb\xbf" + GOOD, ", line 1: invalid JSON at character 1: Unexpected UTF-8 BOM", {}),
    "missing_prompt": (
        GOOD + b'{"promt": "a", "answer": "b"}\n',
        ", line 2: there is no field 'prompt' (did you mean 'promt'?); there are promt, answer",
        {},
    ),
    "missing_answer": (b"{}\n", ", line 1: there is no field 'prompt'; there are none", {}),
    "missing_in_template": (
        GOOD,
        ", line 1: there is no field 'promptt' (did you mean 'prompt'?); there are prompt, answer, level",
        {"prompt": "Q: {promptt}"},
    ),
    "missing_level": (
        GOOD + b'{"prompt": "a", "answer": "b"}\n',
        ", line 2: there is no field 'level'; there are prompt, answer",
        {"level": "level"},
    ),
    "missing_metadata": (GOOD, ", line 1: there is no field 'tags'; there are", {"metadata": ["tags"]}),
    "prompt_is_a_list": (
        b'{"prompt": ["a"], "answer": "b"}\n',
        ", line 1: field 'prompt' must be a text or a number, got list ['a']",
        {},
    ),
    "answer_is_null": (
        GOOD + b'{"prompt": "a", "answer": null}\n',
        ", line 2: field 'answer' must be a text or a number, got nothing (null)",
        {},
    ),
    "answer_is_a_truth_value": (
        b'{"prompt": "a", "answer": true}\n',
        ", line 1: field 'answer' must be a text or a number, got bool True",
        {},
    ),
    "level_is_text": (
        b'{"prompt": "a", "answer": "b", "level": "Level 5"}\n',
        ", line 1: field 'level', the level, must be a whole number, got str 'Level 5'",
        {"level": "level"},
    ),
    "level_is_a_float": (
        b'{"prompt": "a", "answer": "b", "level": 1.5}\n',
        ", line 1: field 'level', the level, must be a whole number, got float 1.5",
        {"level": "level"},
    ),
    "prompt_is_empty": (GOOD + b'{"prompt": "", "answer": "b"}\n', ", line 2: the prompt is empty", {}),
    "prompt_is_blank": (b'{"prompt": " \\n\\t", "answer": "b"}\n', ", line 1: the prompt is empty", {}),
    "lone_surrogate": (
        b'{"prompt": "a \\ud800", "answer": "b"}\n',
        ", line 1: the prompt holds a lone surrogate, which is no text",
        {},
    ),
    "only_blank_lines": (b"\n \n\n", ": there are no rows", {}),
    "empty": (b"", ": the file is empty", {}),
    "gzip": (gzip.compress(GOOD), ": the file is compressed (gzip): unpack it", {}),
    "one_endless_line": (
        GOOD + b'{"prompt": "' + b"x" * MAX_LINE_BYTES,
        f", line 2: more than {MAX_LINE_BYTES >> 20} MiB in one line",
        {},
    ),
    "other_contents": (GOOD, ": the contents have changed: their SHA-256 is", {"sha256": "0" * 64}),
}


def refused(kind, path, kwargs=None):
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        make_source(kind, path=str(path), **(kwargs or {}))
    assert caught.type is ValueError
    message = str(caught.value)
    assert len(message) < 1_000
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


@pytest.mark.parametrize("name", BAD_JSONL)
def test_a_bad_jsonl_file_is_refused_with_its_line(tmp_path, name):
    contents, expected, kwargs = BAD_JSONL[name]
    if name == "trailing_comma" and sys.version_info < (3, 13):
        expected = ", line 1: invalid JSON at character 16: Expecting property name"
    path = tmp_path / f"{name}.jsonl"
    path.write_bytes(contents)
    assert refused("jsonl", path, kwargs).startswith(expected)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_paths_that_are_no_files(tmp_path, kind):
    (tmp_path / f"train.{kind}").write_bytes(b"")
    assert refused(kind, tmp_path / f"trian.{kind}") == f": there is no such file (did you mean 'train.{kind}'?)"
    assert refused(kind, tmp_path / "nowhere" / "x") == ": there is no such file"
    assert refused(kind, tmp_path / "*.txt") == ": no file matches the pattern"
    assert refused(kind, tmp_path).startswith(": this is a directory; a pattern such as ")
    assert refused(kind, tmp_path / f"train.{kind}") == ": the file is empty"
    twice = [str(tmp_path / f"train.{kind}")] * 2
    with pytest.raises(ValueError, match=rf"train.{kind}: the file is named twice"):
        make_source(kind, path=twice)


def test_the_second_of_several_files_is_named(tmp_path):
    (tmp_path / "a").write_bytes(GOOD)
    (tmp_path / "b").write_bytes(GOOD + b"{}\n")
    with pytest.raises(ValueError, match=rf"{tmp_path / 'b'}, line 2: there is no field 'prompt'"):
        make_source("jsonl", path=[str(tmp_path / "a"), str(tmp_path / "b")])


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"prompt": "{"}, ValueError, "bad template for prompt, '{': Single '{' encountered"),
        ({"prompt": "}"}, ValueError, "bad template for prompt, '}': Single '}' encountered"),
        ({"prompt": "{}"}, ValueError, "only plain fields such as {question} can be named"),
        ({"prompt": "{a.b}"}, ValueError, "only plain fields"),
        ({"prompt": "{a[0]}"}, ValueError, "only plain fields"),
        ({"prompt": "{a!r}"}, ValueError, "only plain fields"),
        ({"prompt": "{a:>9}"}, ValueError, "only plain fields"),
        ({"answer": "{{a}}"}, ValueError, "bad template for answer, '{{a}}': it names no field"),
        ({"prompt": ""}, TypeError, "prompt must be a field's name or a template, got ''"),
        ({"answer": 3}, TypeError, "answer must be a field's name or a template, got 3"),
        ({"metadata": "tags"}, TypeError, "metadata must be a sequence of field names, got 'tags'"),
        ({"path": ()}, TypeError, "path must be a file, a pattern, or a sequence of these"),
        ({"path": 3}, TypeError, "path must be a file, a pattern, or a sequence of these"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, kwargs, error, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD)
    with pytest.raises(error, match=re.escape(message)):
        make_source("jsonl", **{"path": str(path), **kwargs})


def table(columns):
    return pytest.importorskip("pyarrow").table(columns)


def invalid_utf8():
    pyarrow = pytest.importorskip("pyarrow")
    # The text of the second row is one byte that starts no character.
    buffers = [None, pyarrow.array([0, 1, 2], pyarrow.int32()).buffers()[1], pyarrow.py_buffer(b"a\xff")]
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 2, buffers)
    return pyarrow.table({"prompt": texts, "answer": ["1", "2"]})


BAD_PARQUET = {
    "missing_column": (
        lambda: table({"promt": ["a"], "answer": ["1"]}),
        ": there is no column 'prompt' (did you mean 'promt'?); there are ['promt', 'answer']",
        {},
    ),
    "null": (
        lambda: table({"prompt": ["a", None], "answer": ["1", "2"]}),
        ", row 1: field 'prompt' must be a text or a number, got nothing (null)",
        {},
    ),
    "bytes": (
        lambda: table({"prompt": ["a"], "answer": [b"1"]}),
        ", row 0: field 'answer' must be a text or a number, got bytes b'1'",
        {},
    ),
    "structure": (
        lambda: table({"prompt": ["a"], "answer": [{"value": 1}]}),
        ", row 0: field 'answer' must be a text or a number, got dict {'value': 1}",
        {},
    ),
    "nan": (
        lambda: table({"prompt": ["a"], "answer": [float("nan")]}),
        ", row 0: field 'answer' must be a text or a number, got float nan",
        {},
    ),
    "level_is_text": (
        lambda: table({"prompt": ["a"], "answer": ["1"], "level": ["hard"]}),
        ", row 0: field 'level', the level, must be a whole number, got str 'hard'",
        {"level": "level"},
    ),
    "metadata_is_bytes": (
        lambda: table({"prompt": ["a"], "answer": ["1"], "raw": [b"x"]}),
        ", row 0: field 'raw', which goes into the metadata: b'x' would not survive JSON",
        {"metadata": ["raw"]},
    ),
    "blank": (lambda: table({"prompt": ["a", "b", " "], "answer": ["1"] * 3}), ", row 2: the prompt is empty", {}),
    "invalid_utf8": (invalid_utf8, ", row 1: invalid UTF-8: invalid start byte", {}),
    "no_rows": (lambda: table({"prompt": [""], "answer": [""]}).slice(0, 0), ": there are no rows", {}),
}


@pytest.mark.parametrize("name", BAD_PARQUET)
def test_a_bad_parquet_file_is_refused_with_its_row(tmp_path, name):
    parquet = pytest.importorskip("pyarrow.parquet")
    make_table, expected, kwargs = BAD_PARQUET[name]
    path = tmp_path / f"{name}.parquet"
    parquet.write_table(make_table(), path)
    assert refused("parquet", path, kwargs).startswith(expected)


def test_what_is_no_parquet_file_or_is_cut_off(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    path.write_bytes(GOOD)
    assert refused("parquet", path).startswith(": not a readable Parquet file, or one that is cut off")
    parquet.write_table(table({"prompt": [f"p{i}" for i in range(1_000)], "answer": ["1"] * 1_000}), path)
    whole = path.read_bytes()
    for length in (len(whole) // 2, len(whole) - 1, 8):
        path.write_bytes(whole[:length])
        assert refused("parquet", path).startswith(": not a readable Parquet file, or one that is cut off")
    damaged = bytearray(whole)
    damaged[100:2_000] = bytes(1_900)  # its footer is whole
    path.write_bytes(damaged)
    assert refused("parquet", path).startswith(": not a readable Parquet file, or one that is cut off")


def test_no_message_holds_a_whole_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": ["x" * 1_000_000], "answer": "1"}) + "\n")
    assert "line 1: field 'prompt' must be a text" in refused("jsonl", path)
