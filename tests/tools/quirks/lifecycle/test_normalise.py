"""What launchers, loggers, collectors and terminals added is taken away; what the compiler wrote is not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lifecycle_logs import CASES

from portattn.tools.quirks.failure_log import decode_text, normalise, patterns

ERROR = "k.py:1:1: error: 'tt.load' op is bad"


def test_every_prefix_is_tried() -> None:
    assert {name for name, _, _ in CASES["prefixes"]} == {prefix.name for prefix in patterns().prefix}
    assert all(prefix.source for prefix in patterns().prefix)


@pytest.mark.parametrize(("name", "prefix", "stream"), CASES["prefixes"])
def test_a_prefix(name: str, prefix: str, stream: str) -> None:
    lines = ["Traceback (most recent call last):", '  File "k.py", line 1', ERROR, ""]
    log = normalise("".join(f"{prefix}{line}".rstrip() + "\n" for line in lines))
    found = [(line.number, line.text, line.stream) for line in log.lines]
    assert found == [(number, line, stream) for number, line in enumerate(lines, 1)]


def test_prefixes_of_prefixes() -> None:
    for prefix, stream in (
        ("2026-11-02T08:15:30.1Z 0: [default6]:[rank6]:E0205 09:51:38.047000 18628 a.py:1] [0/0] ", "0/6"),
        ("(Worker pid=3777) (Worker_TP3 pid=3777) ERROR 04-02 15:45:51 [multiproc_executor.py:880] ", "3777"),
    ):
        log = normalise(f"{prefix}{ERROR}\n" * 4)
        assert {(line.text, line.stream) for line in log.lines} == {(ERROR, stream)}


@pytest.mark.parametrize(
    "text",
    [
        "0: error\nno rank here\nnor here\n",  # few lines that look so
        "> only one line is quoted\nand no other\nat all\nis\n", "[1, 2]: a list\n", "(see pid=3 of the table\n",
        "a-1 | b\nc\nd\ne\n", "    indented[3m] is kept\n".replace("[3m]", "[3]"),
        '#blocked = #ttg.blocked<{order = [0]}>\n%0 = "tt.load"(%arg0) : (!tt.ptr<f16>) -> f16\n',
    ],
)  # fmt: skip
def test_what_only_looks_like_a_prefix_is_kept(text: str) -> None:
    assert normalise(text).text == text


def test_colours() -> None:
    for red in ("\x1b[31m", "\x1b[1;31m", "\x1b[38;5;9m", "[31m", "\x1b]0;title\x07"):
        assert normalise(f"{red}{ERROR}\x1b[0m\n").text == f"{ERROR}\n"
    assert normalise(f"[36m(RayTask pid=7)[0m {ERROR}\n").lines[0].stream == "7", "copied from a page"
    assert normalise("x[36] and tensor<4xf32>[0]\n").text == "x[36] and tensor<4xf32>[0]\n"


def test_a_line_that_was_overwritten_is_several_and_one_that_a_collector_cut_is_whole_again() -> None:
    log = normalise(f"  0%|   | 0/4\r 25%|## | 1/4\r{ERROR}\r\nnext\r\n")
    assert [(line.number, line.text) for line in log.lines][-2:] == [(1, ERROR), (2, "next")]
    now = "2026-11-02T08:15:30.1Z std"
    log = normalise(f"{now}err P one \n{now}out F other\n{now}err P two \n{now}err F three\n{now}err F four\n")
    assert log.text.splitlines() == ["one other", "two three", "four"], "of one stream, as the two outputs are"
    assert len(normalise(f"{ERROR} {'_' * 2**20}\n").text) < 2**16, "a long line loses its middle"


def test_windows_writes_utf_16() -> None:
    for encoding in ("utf-16", "utf-8-sig", "utf-8"):
        assert decode_text(f"{ERROR}\r\n".encode(encoding)) == f"{ERROR}\r\n"
    assert decode_text(b"\xff\xfeb\x00a\x00") == "ba"
    assert "error" in decode_text(b"error \xe4\xff\n"), "what is no text does not hide the rest"


def test_ranks_are_apart() -> None:
    log = normalise("".join(f"[rank{rank}]: line {n}\n" for n in range(3) for rank in (0, 1)) + "nobody's\n")
    assert [(stream.name, len(stream.lines)) for stream in log.streams] == [("", 1), ("0", 3), ("1", 3)]
    assert log.streams[1].text == "line 0\nline 1\nline 2\n"


def test_an_exception_in_the_words_of_repr() -> None:
    log = normalise("exception=CompilationError('at 1:2:\\ndef f():\\n    ^\\nValueError: no')>\n")
    assert [line.text for line in log.lines][1:] == ["def f():", "    ^", "ValueError: no"]


@given(st.text(max_size=300))
def test_nothing_makes_it_fail(text: str) -> None:
    log = normalise(text)
    assert all(1 <= line.number <= text.count("\n") + 1 for line in log.lines)
    assert sum(len(stream.lines) for stream in log.streams) == len(log.lines)


def test_lines_of_dockers_json_file_driver() -> None:
    stored = '{"log":"%s","stream":"stderr","time":"2026-11-02T08:15:30.1Z"}'
    lines = [stored % (ERROR.replace('"', '\\"') + "\\n"), stored % "  indented\\n", '{"log":"cut off', "plain"]
    log = normalise("\n".join(lines) + "\n")
    assert [(line.number, line.text) for line in log.lines] == [
        (1, ERROR), (2, "  indented"), (3, '{"log":"cut off'), (4, "plain"),
    ]  # fmt: skip
