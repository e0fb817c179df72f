"""The command `hybrid`: parse, call, print. Heavy packages are imported by the command that needs them."""

from __future__ import annotations

import argparse
import difflib
import os
import select
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from typing import NoReturn

from .arguments import count, part


class UsageError(ValueError):
    """A command line that cannot be understood."""


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are one line; help texts keep their layout."""

    def __init__(self, *args, **kwargs) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


@dataclass(frozen=True)
class Command:
    """A subcommand: how its arguments are declared and what it does with them (returns the exit code)."""

    summary: str
    example: str
    declare: Callable[[Parser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 checks failed, 2 a mistake in what was asked,
    69 other processes of the run lost, 130 interrupted. Only a fault of the program itself leaves as an
    exception."""
    if sys.stdout is None:  # closed by who started us: nobody wants the text, files are written all the same
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (open until the process ends)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that lacks a character must not end the run
            stream.reconfigure(errors="backslashreplace")
    # Threads that spin while they wait stand in each other's way where a core is shared: a quickstart step
    # took 10 s beside one busy process. With spins this short it took 1.6 s, and no longer than before on an
    # idle machine (a third longer when they sleep at once). Read when torch loads its OpenMP.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    try:
        code = _dispatch(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _reader_gone():
            return 141  # what a shell reports for a program ended by SIGPIPE
        return _complain(_describe(error), 2)
    except ValueError as error:
        if type(error) is ValueError:  # not one of the errors meant for people
            raise
        return _complain(str(error), getattr(error, "exit_code", 2))


def _dispatch(argv: Sequence[str]) -> int:
    arguments = _main_parser().parse_args(argv)
    if arguments.command is None:
        print(_main_parser().format_help(), end="")
        return 0
    command = COMMANDS.get(arguments.command)
    if command is None:
        raise UsageError(
            f"unknown command '{arguments.command}'{_nearest(arguments.command, COMMANDS)} "
            f"Commands: {', '.join(COMMANDS)}"
        )
    parser = Parser(
        prog=f"hybrid {arguments.command}",
        description=command.summary,
        epilog=f"example:\n  {command.example}",
    )
    command.declare(parser)
    return command.run(parser.parse_intermixed_args(arguments.arguments))


def _main_parser() -> Parser:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items())
    parser = Parser(
        prog="hybrid",
        usage="hybrid [-h] [--version] COMMAND ...",
        description="Train hybrid language models whose layers are mixed by a pattern string.",
        epilog=f"commands:\n{listing}\n\n`hybrid COMMAND --help` shows its arguments and an example.",
    )
    parser.add_argument("--version", action="version", version=f"hybrid {version('kvm-hybrid')}")
    # The deepspeed launcher puts this first; the environment says the same.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _nearest(word: str, known) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean '{near[0]}'?" if near else "."


def _complain(message: str, code: int) -> int:
    rank = os.environ.get("RANK", "0")
    where = "" if rank == "0" else f" (rank {rank})"
    print(f"hybrid: error{where}: {message}", file=sys.stderr, flush=True)
    return code


def _describe(error: OSError) -> str:
    reason = error.strerror or str(error) or type(error).__name__
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return ": ".join([*names, reason])


def _reader_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more (and not some other pipe that broke)."""
    try:
        output = sys.stdout.fileno()
    except (OSError, ValueError):  # replaced by something that is no file
        return False
    poll = select.poll()
    poll.register(output, select.POLLOUT)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)  # so that the last flush is quiet
    return True


# ---------------------------------------------------------------- recipes


def _declare_recipe(parser: Parser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file, or the name of a shipped recipe")
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", help="recipe keys set here, e.g. optimizer.lr=3e-4"
    )


def _load_recipe(arguments: argparse.Namespace, processes: int | None = None):
    from .recipe import load

    return load(arguments.recipe, arguments.overrides, world_size=processes)


# ---------------------------------------------------------------- commands


def _train(arguments: argparse.Namespace) -> int:
    from .train.launcher import number

    recipe = _load_recipe(arguments, number("WORLD_SIZE", 1, least=1))
    from .train import train

    summary = train(recipe)
    if os.environ.get("RANK", "0") == "0":
        from .evaluate.summary import report

        print(report(recipe, summary))
    return 0


def _declare_prepare(parser: Parser) -> None:
    _declare_recipe(parser)
    parser.add_argument(
        "--part",
        type=part,
        default=(1, 1),
        metavar="i/n",
        help="prepare the i-th of n parts on this machine",
    )
    parser.add_argument("--processes", type=count, metavar="N", help="default: the recipe's, or one per core")
    parser.add_argument("--force", action="store_true", help="prepare again what is already there")


def _prepare(arguments: argparse.Namespace) -> int:
    recipe = _load_recipe(arguments)
    from .data import prepare

    report = prepare(recipe.data, part=arguments.part, processes=arguments.processes, force=arguments.force)
    print(report)
    return 0


def _declare_info(parser: Parser) -> None:
    _declare_recipe(parser)
    parser.add_argument("--processes", type=count, default=1, metavar="N", help="processes it will run on")
    parser.add_argument(
        "--plot", metavar="FILE.png", help="draw each layer's state and FLOPs against the context's length"
    )


def _info(arguments: argparse.Namespace) -> int:
    recipe = _load_recipe(arguments, arguments.processes)
    from .info import describe

    print(describe(recipe, arguments.processes))
    if arguments.plot:
        from .info_plot import draw

        draw(recipe, arguments.plot)
        print(f"\nplot: {arguments.plot}")
    return 0


def _declare_launch(parser: Parser) -> None:
    _declare_recipe(parser)
    from .launch.arguments import declare

    declare(parser)


def _launch(arguments: argparse.Namespace) -> int:
    from .launch.plan import Request, plan

    given = {field.name: getattr(arguments, field.name) for field in fields(Request)}
    chosen = plan(Request(**given | {"overrides": tuple(arguments.overrides)}))
    recipe = _load_recipe(arguments, chosen.processes)
    if arguments.dry_run:
        from .launch.report import describe

        print(describe(chosen, recipe))
        return 0
    from .launch.start import start

    start(chosen, arguments.node_rank)


def _declare_verify(parser: Parser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="stored test vectors")
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu (the default) or cuda")
    parser.add_argument(
        "--precision", choices=("fp32", "bf16"), default="fp32", help="bf16 has wider tolerances"
    )


def _verify(arguments: argparse.Namespace) -> int:
    from .verify import Setting, verify

    return verify(arguments.folder, Setting(arguments.device, arguments.precision))


def _declare_generate(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory or a converted model")
    text = parser.add_argument_group("prompts (none: start a new document)")
    text.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="text to continue; repeat it for several; - reads one prompt from standard input",
    )
    text.add_argument("--prompts-file", metavar="FILE", help="one prompt a line; blank lines are skipped")
    text.add_argument(
        "--separator",
        metavar="LINE",
        help="the prompts of the file may span lines and stand between lines that read exactly LINE",
    )
    length = parser.add_argument_group("length")
    length.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="new tokens at most (%(default)s)"
    )
    length.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )
    choice = parser.add_argument_group("choice of tokens")
    choice.add_argument(
        "--temperature", type=float, default=0.8, metavar="X", help="0 is greedy (%(default)s)"
    )
    choice.add_argument("--top-k", type=int, default=0, metavar="K", help="the K most probable only (0: off)")
    choice.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="the most probable, up to this sum of probabilities (1: off)",
    )
    choice.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="X", help="above 1 avoids repeats (1: off)"
    )
    choice.add_argument(
        "--seed", type=int, default=0, metavar="N", help="sample i of seed N is sample 0 of seed N + i"
    )
    choice.add_argument(
        "--samples", type=int, default=1, metavar="N", help="continuations of each prompt (%(default)s)"
    )
    parser.add_argument(
        "--batch", type=int, default=16, metavar="N", help="sequences decoded side by side (%(default)s)"
    )
    state = parser.add_argument_group("long documents (one prompt; with --max-tokens 0 it is only read)")
    state.add_argument(
        "--save-state", metavar="FILE", help="keep what the model remembers after prompt and continuation"
    )
    state.add_argument("--load-state", metavar="FILE", help="go on from there; the prompt is what follows")


def _generate(arguments: argparse.Namespace) -> int:
    from .terminal import Printer, read_prompts, read_state

    prompts = read_prompts(arguments.prompt, arguments.prompts_file, arguments.separator)
    from .choice import Settings

    settings = {field.name: getattr(arguments, field.name) for field in fields(Settings)}
    Settings(**settings)  # what is wrong is found before the model is read
    begin = read_state(arguments.load_state, arguments.save_state, len(prompts), arguments.samples)
    from .generate import generate, load_model

    model, tokenizer = load_model(arguments.run)
    printer = Printer(prompts, arguments.samples)
    generate(
        model,
        tokenizer,
        prompts,
        begin=begin and begin.to(model.head.weight.device),
        on_text=printer.text,
        on_end=printer.end,
        on_bookmark=arguments.save_state and (lambda bookmark: bookmark.save(arguments.save_state)),
        **settings,
    )
    return 0


def _declare_bench(parser: Parser) -> None:
    parser.add_argument(
        "what",
        metavar="kvm|mixers|model|scale",
        choices=("kvm", "mixers", "model", "scale"),
        help="the KVM operator's numbers to reach; every kind of layer; a recipe's whole model; or processes",
    )
    parser.add_argument("arguments", metavar="RECIPE key=value", nargs="*", help="for model, as in `train`")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: seconds, to see that it runs")
    parser.add_argument("--output", metavar="DIR", help="keep JSON and plots there")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help="one part of kvm or scale, or one kind of mixers",
    )
    parser.add_argument("--threads", type=count, metavar="N", help="default: one per core")


def _bench(arguments: argparse.Namespace) -> int:
    whole_model = arguments.what == "model"
    if whole_model != bool(arguments.arguments):
        found = "needs a RECIPE" if whole_model else f"takes no '{arguments.arguments[0]}'"
        raise UsageError(f"hybrid bench {arguments.what} {found} (see hybrid bench --help)")
    if whole_model and (arguments.quick or arguments.only):
        raise UsageError("bench model takes neither --quick nor --only: its sizes are the recipe's")
    from .bench import run

    return run(
        arguments.what,
        arguments.arguments,
        quick=arguments.quick,
        output=arguments.output,
        only=arguments.only,
        threads=arguments.threads,
    )


COMMANDS = {
    "train": Command(
        "Train a model; prepares its data first if it is not there.",
        "hybrid train recipes/quickstart.yaml train.steps=100",
        _declare_recipe,
        _train,
    ),
    "launch": Command(
        "Train on several processors or machines, or show what that takes.",
        "hybrid launch recipes/quickstart.yaml --hostfile hosts --dry-run",
        _declare_launch,
        _launch,
    ),
    "prepare": Command(
        "Turn text into a tokenizer and token shards.",
        "hybrid prepare recipes/quickstart.yaml --processes 2",
        _declare_prepare,
        _prepare,
    ),
    "info": Command(
        "Show a recipe's layers, parameters, FLOPs, state and memory, without building it.",
        "hybrid info recipes/quickstart.yaml 'model.pattern=(WK)4' --processes 8",
        _declare_info,
        _info,
    ),
    "generate": Command(
        "Continue prompts with a trained model.",
        "hybrid generate runs/quickstart --prompt 'def main(' --temperature 0.8 --samples 3",
        _declare_generate,
        _generate,
    ),
    "verify": Command(
        "Compare this machine's results with stored test vectors; exit 1 when one differs.",
        "hybrid verify tests/vectors",
        _declare_verify,
        _verify,
    ),
    "bench": Command(
        "Measure this machine: the KVM operator, every layer, a recipe's model, or processes.",
        "hybrid bench kvm --output benchmarks/results",
        _declare_bench,
        _bench,
    ),
}
