"""The command line: what it accepts, and that mistakes give one readable message and no traceback."""

import errno
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from hybrid.cli.commands import COMMANDS
from hybrid.cli.main import main
from hybrid.errors import UserError

HEAVY = ("torch", "deepspeed", "sentencepiece", "grain", "numpy", "omegaconf")


def hybrid(*arguments, **options):
    options = {"capture_output": True, "text": True, "timeout": 60, **options}
    return subprocess.run([sys.executable, "-m", "hybrid", *arguments], **options)


@pytest.fixture
def given(monkeypatch):
    """Replace what a command does by a function of its parsed arguments; returns the arguments seen."""

    def put(name, run=lambda arguments: 0):
        seen = []

        def record(arguments):
            seen.append(arguments)
            return run(arguments)

        monkeypatch.setitem(COMMANDS, name, replace(COMMANDS[name], run=record))
        return seen

    return put


def raising(error):
    def run(arguments):
        raise error

    return run


@pytest.mark.parametrize("arguments", ["--help", "--version", "generate --help", "launch --help"])
def test_help_and_version_import_nothing_heavy(arguments):
    code = (
        "import sys; from hybrid.cli.main import main\n"
        f"try: main({arguments.split()})\n"
        "except SystemExit: pass\n"
        f"print('HEAVY', [name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("HEAVY []\n"), done.stdout + done.stderr


def test_help_lists_every_command_and_each_has_an_example(capsys):
    assert main([]) == 0
    overview = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"  {name} " in overview
        with pytest.raises(SystemExit) as end:
            main([name, "--help"])
        assert end.value.code == 0
        text = capsys.readouterr().out
        assert f"example:\n  hybrid {name} " in text
        assert command.summary in text


def test_version_names_the_installed_one():
    from importlib.metadata import version

    assert hybrid("--version").stdout == f"hybrid {version('kvm-hybrid')}\n"


@pytest.mark.parametrize("before", [[], ["--local_rank=1"], ["--local-rank", "1"]])
def test_launchers_local_rank_is_accepted_in_front(given, before):
    seen = given("train")
    assert main([*before, "train", "r.yaml", "a.b=1"]) == 0
    assert (seen[0].recipe, seen[0].overrides) == ("r.yaml", ["a.b=1"])


def test_overrides_and_options_come_in_any_order(given):
    seen = given("prepare")
    assert main(["prepare", "--part", "2/3", "r.yaml", "a=-1", "--force", "b=x y"]) == 0
    assert (seen[0].recipe, seen[0].overrides) == ("r.yaml", ["a=-1", "b=x y"])
    assert (seen[0].part, seen[0].force, seen[0].processes) == ((2, 3), True, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "unknown command 'trian'; did you mean train? Commands: train, "),
        (["zzz"], "unknown command 'zzz'. Commands: train, "),
        (["--verison"], "unrecognized arguments: --verison"),
        (["train"], "the following arguments are required: RECIPE"),
        (
            ["train", "r.yaml", "--proceses", "2"],
            "unrecognized arguments: --proceses 2 (see hybrid train --help)",
        ),
        (["prepare", "r.yaml", "--part", "3/2"], "argument --part: '3/2' is not of the form i/n"),
        (["prepare", "r.yaml", "--part", "x"], "argument --part: 'x' is not of the form i/n"),
        (
            ["info", "r.yaml", "--processes", "0"],
            "argument --processes: '0' is not a whole number of 1 or more",
        ),
        (["generate", "r", "--top-k", "many"], "argument --top-k: invalid int value: 'many'"),
        (["generate", "r", "--separator", "--"], "argument --separator: expected one argument"),
        (["generate", "r", "--separator=x"], "--separator belongs to --prompts-file"),
        (["generate", "r", "--top-p", "1.5"], "top_p is 1.5; it must be above 0 and at most 1"),
        (["generate", "r", "--max-tokens", "-1"], "max_tokens is -1; it must be 0 or more"),
        (["generate", "r", "--prompts-file", "no/such"], "no/such: No such file or directory"),
    ],
)
def test_mistakes_give_one_message_and_code_2(arguments, message, capsys):
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"hybrid: error: {message}")
    assert shown.err.count("hybrid: error") == 1
    assert "Traceback" not in shown.err


@pytest.mark.parametrize(
    ("asked", "found"),
    [("mine/tinny.yaml", "mine/tiny.yaml"), ("quikstart", "recipes/quickstart.yaml"), ("q", None)],
)
def test_a_misspelt_recipe_names_the_nearest(tmp_path, capsys, monkeypatch, asked, found):
    monkeypatch.chdir(tmp_path)
    for name in ("mine/tiny.yaml", "recipes/quickstart.yaml"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    assert main(["info", asked]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("hybrid: error: ")
    assert f"no file {asked} " in shown
    assert (f"did you mean {found}?" in shown) if found else ("did you mean" not in shown)


class Unfit(UserError):
    """An error meant for people."""


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (Unfit("two\nlines"), 2, "two\nlines"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/x/y"), 2, "/x/y: No space left on device"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 2, "No space left on device"),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES), "z"), 2, "z: Permission denied"),
        (BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)), 2, "Broken pipe"),  # not standard output's
        (KeyboardInterrupt(), 130, "interrupted"),
        (KeyboardInterrupt("interrupted in words"), 130, "interrupted in words"),
    ],
)
def test_errors_for_people_are_one_message(given, capsys, error, code, message):
    given("verify", raising(error))
    assert main(["verify", "x"]) == code
    assert capsys.readouterr().err == f"hybrid: error: {message}\n"


@pytest.mark.parametrize(
    "error",
    [ValueError("bug"), KeyError("bug"), AssertionError(), RuntimeError("bug\nin lines"), OSError("bug")],
)
def test_a_defect_of_the_program_is_one_line_that_names_the_file_of_its_traceback(
    given, capsys, monkeypatch, tmp_path, error
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    given("verify", raising(error))
    assert main(["verify", "x"]) == 70
    (file,) = tmp_path.iterdir()
    shown = capsys.readouterr().err
    assert shown.startswith(
        f"hybrid: error: a defect of the program, please report it: {type(error).__name__}"
    )
    assert shown.endswith(f" (its traceback is in {file})\n")
    assert shown.count("\n") == 1
    assert "Traceback (most recent call last)" in file.read_text()
    assert "in raising" not in shown


def test_a_defect_shows_its_traceback_where_no_file_can_be_written(given, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    given("verify", raising(ValueError("bug")))
    assert main(["verify", "x"]) == 70
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback (most recent call last)")
    assert "ValueError: bug (its traceback is above" in shown


def test_other_ranks_say_who_they_are(given, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    given("verify", raising(Unfit("no")))
    assert main(["verify", "x"]) == 2
    assert capsys.readouterr().err == "hybrid: error (rank 3): no\n"


def test_exit_code_is_the_commands(given):
    given("verify", lambda arguments: 1)
    assert main(["verify", "x"]) == 1


def test_a_reader_that_leaves_ends_the_program_quietly():
    read, write = os.pipe()
    os.close(read)
    try:
        done = hybrid(stdout=write, stderr=subprocess.PIPE, capture_output=False)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_terminal_without_a_character_does_not_end_the_program():
    code = "import sys; from hybrid.cli.main import main; main([]); print('\\u00e9')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.stdout.endswith("\\xe9\n"), done.stderr


@pytest.mark.parametrize(("stdout", "stderr"), [("/dev/full", None), ("/dev/full", "/dev/full")])
def test_a_console_that_takes_nothing_is_told_and_nothing_more(stdout, stderr, tmp_path):
    """Text that was lost is an error, without Python's own words about its last flush."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open(stdout, "w") as full, open(stderr or tmp_path / "err", "w") as err:
        done = subprocess.run(
            [sys.executable, "-m", "hybrid", "info", "debug"], stdout=full, stderr=err, env=environment
        )
    assert done.returncode == 2
    if stderr is None:
        wanted = "hybrid: error: standard output: No space left on device\n"
        assert (tmp_path / "err").read_text() == wanted
