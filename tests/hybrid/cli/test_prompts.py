"""Where prompts come from, and the order in which continuations are shown."""

import subprocess
import sys

import pytest

from hybrid.cli.prompts import Printer, PromptError, read_prompts, split_prompts
from hybrid.generate import Continuation


@pytest.mark.parametrize(
    ("text", "separator", "expected"),
    [
        ("one\ntwo\n\n  \nthree", None, ["one", "two", "three"]),
        ("one\r\n two \r\n", None, ["one", " two "]),
        ("", None, []),
        ("one\ntwo\n---\nthree\n\nfour\n---\n", "---", ["one\ntwo", "three\n\nfour"]),
        ("---\none\n--- \nstill", "---", ["one\n--- \nstill"]),
        ("one\r\ntwo\r\n---\r\nthree", "---", ["one\ntwo", "three"]),
        ("only", "", ["only"]),
        ("a\nb\n\nc", "", ["a\nb", "c"]),
    ],
)
def test_prompts_in_a_file(text, separator, expected):
    assert split_prompts(text, separator) == expected


def test_texts_come_before_the_files_prompts_and_nothing_is_one_empty_prompt(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("from file\n", encoding="utf-8")
    assert read_prompts(["first", ""], str(file), None) == ["first", "", "from file"]
    assert read_prompts([], None, None) == [""]


def test_files_without_prompts_and_bytes_that_are_no_text_are_refused(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("\n \n")
    with pytest.raises(PromptError, match=r"prompts.txt holds no prompt"):
        read_prompts([], str(file), None)
    file.write_bytes(b"ab\xff")
    with pytest.raises(PromptError, match=r"prompts.txt is not UTF-8 text: .* at byte 2"):
        read_prompts([], str(file), None)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_prompts_in_other_encodings_are_refused_in_words(tmp_path, encoding):
    file = tmp_path / "prompts.txt"
    file.write_bytes("a prompt".encode(encoding))
    with pytest.raises(PromptError, match=r"prompts.txt is not UTF-8 text but UTF-16 or UTF-32"):
        read_prompts([], str(file), None)


def test_byte_marks_and_line_ends_are_no_part_of_prompts(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes("one\r\n\ufefftwo\r\n--\r\nthree\r\n".encode("utf-8-sig"))
    assert read_prompts([], str(file), None) == ["one", "\ufefftwo", "--", "three"]
    assert read_prompts([], str(file), "--\r") == ["one\n\ufefftwo", "three"]


def test_a_dash_reads_standard_input_whole_but_for_the_last_newline():
    code = "from hybrid.cli.prompts import read_prompts; print(ascii(read_prompts(['x', '-'], None, None)))"
    given = " zwei\n\tZeilen é\n\n".encode()
    done = subprocess.run([sys.executable, "-c", code], input=given, capture_output=True, timeout=60)
    assert done.stdout.decode().strip() == ascii(["x", " zwei\n\tZeilen é\n"])
    given = "a\r\nb\r\n".encode("utf-8-sig")
    done = subprocess.run([sys.executable, "-c", code], input=given, capture_output=True, timeout=60)
    assert done.stdout.decode().strip() == ascii(["x", "a\r\nb"])


@pytest.fixture
def shown(capsys):
    """Gives everything printed since the test began."""
    parts = []

    def read():
        parts.append(capsys.readouterr().out)
        return "".join(parts)

    return read


def test_one_continuation_grows_behind_its_prompt(shown):
    printer = Printer(["the"], 1)
    assert shown() == "the"
    printer.text(0, 0, " end")
    assert shown() == "the end"
    printer.end(Continuation(0, 0, (), " end", "eos"))
    assert shown() == "the end\n"


def test_later_continuations_wait_for_their_turn(shown):
    printer = Printer(["A", "B"], 1)
    printer.text(1, 0, "b")
    printer.end(Continuation(1, 0, (), "b", "eos"))
    printer.text(0, 0, "a")
    assert shown() == "--- prompt 1, sample 1 ---\nAa"
    printer.end(Continuation(0, 0, (), "a", "length"))
    assert shown() == "--- prompt 1, sample 1 ---\nAa\n--- prompt 2, sample 1 ---\nBb\n"


def test_a_waiting_continuation_goes_on_live_when_its_turn_comes(shown):
    printer = Printer(["A"], 2)
    printer.text(0, 1, "x")
    printer.end(Continuation(0, 0, (), "", "eos"))
    printer.text(0, 1, "y")
    assert shown().endswith("--- prompt 1, sample 2 ---\nAxy")


def test_streams_closed_by_the_caller_are_no_crash(tmp_path):
    """`<&-` is refused in words when it is to be read; with `>&-` the text goes nowhere."""
    command = f"{sys.executable} -m hybrid"
    run = {"shell": True, "capture_output": True, "text": True, "cwd": tmp_path}
    asked = subprocess.run(f"{command} generate run --prompt - <&-", **run)
    assert (asked.returncode, asked.stderr) == (
        2,
        "hybrid: error: standard input is closed, so --prompt - cannot be read\n",
    )
    assert subprocess.run(f"{command} --help >&-", **run).returncode == 0
