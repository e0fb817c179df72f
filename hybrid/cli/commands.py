"""The commands of `hybrid`: parse, call, print. Each imports the heavy packages it needs when it runs."""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

from .arguments import Parser, UsageError, count, layer_numbers, option, part, path, port, rank, size

CONVERT_FROM = ("hybrid", "deepspeed", "paper", "hf")
CONVERT_TO = ("hybrid", "paper", "hf")
"""Names in `hybrid.convert.formats`, which imports torch."""


@dataclass(frozen=True)
class Command:
    """A subcommand: how its arguments are declared and what it does with them (returns the exit code)."""

    summary: str
    example: str
    declare: Callable[[Parser], None]
    run: Callable[[argparse.Namespace], int]


def _declare_recipe(parser: Parser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file, or the name of a shipped recipe")
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", help="recipe keys set here, e.g. optimizer.lr=3e-4"
    )


def _load_recipe(arguments: argparse.Namespace, processes: int | None = None):
    from hybrid.recipe import load

    return load(arguments.recipe, arguments.overrides, world_size=processes)


def keep_freed_memory() -> None:
    """Use freed memory again instead of giving it back to the system, as glibc does with 32 MiB and more.

    The system fills what it hands out again with zeros, page by page: a tenth to a fifth of the time of
    windows and KVM at 32768 tokens, forward and backward. Peaks of memory grew by up to 5 %. Allocators other
    than glibc's are left as they are.
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ
    if chosen or not sys.platform.startswith("linux"):
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        library.mallopt(-4, 0)  # M_MMAP_MAX, <malloc.h>
        library.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def _train(arguments: argparse.Namespace) -> int:
    from hybrid.distributed.environment import number
    from hybrid.distributed.signals import ending_at_once

    keep_freed_memory()
    with ending_at_once():
        recipe = _load_recipe(arguments, number("WORLD_SIZE", 1, least=1))
        from hybrid.train import train

        try:
            summary = train(recipe)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                "interrupted; the same command goes on from the newest checkpoint (SIGTERM writes one first)"
            ) from None
        if os.environ.get("RANK", "0") == "0":
            from hybrid.evaluate.summary import report

            print(report(recipe, summary))
    return 0


def _declare_prepare(parser: Parser) -> None:
    _declare_recipe(parser)
    option(parser, "--part", "i/n", "prepare the i-th of n parts on this machine", part, (1, 1))
    option(parser, "--processes", "N", "default: the recipe's, or one per core", count)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--force", action="store_true", help="prepare again what is damaged or has changed")
    checking = "only compare what is prepared with its checksums"
    how.add_argument("--check", action="store_true", help=checking)


def _prepare(arguments: argparse.Namespace) -> int:
    recipe = _load_recipe(arguments)
    if arguments.check:
        from hybrid.data.checksums import check_prepared

        print(check_prepared(recipe.data))
        return 0
    from hybrid.data.preparation.prepare import prepare

    say = partial(print, file=sys.stderr, flush=True)
    options = {"part": arguments.part, "processes": arguments.processes, "force": arguments.force}
    print(prepare(recipe.data, **options, say=say))
    return 0


def _declare_info(parser: Parser) -> None:
    _declare_recipe(parser)
    option(parser, "--processes", "N", "processes it will run on", count, 1)
    option(
        parser, "--plot", "FILE.png", "draw each layer's state and FLOPs against the context's length", path
    )


def _info(arguments: argparse.Namespace) -> int:
    recipe = _load_recipe(arguments, arguments.processes)
    from hybrid.estimate.info import describe

    print(describe(recipe, arguments.processes))
    if arguments.plot:
        from hybrid.estimate.plot import draw

        draw(recipe, arguments.plot)
        print(f"\nplot: {arguments.plot}")
    return 0


def _declare_launch(parser: Parser) -> None:
    from hybrid.launch.plan import LAUNCHERS

    _declare_recipe(parser)
    where = parser.add_argument_group("where")
    option(where, "--nodes", "N", "default: 1, or every host of the hostfile", count)
    option(where, "--gpus", "M", "processes on a node; default: its GPUs or hostfile slots", count)
    option(where, "--hostfile", "FILE", "lines `NAME slots=N`, the first is the master", path)
    filters = "hosts and slots of the hostfile, such as 'worker-0@worker-1:0,2'"
    option(where, "--include", "FILTER", f"only these {filters}", default="")
    option(where, "--exclude", "FILTER", "all but these", default="")
    how = parser.add_argument_group("how")
    launcher = "default: deepspeed, or torchrun for nodes without a hostfile"
    how.add_argument("--launcher", choices=LAUNCHERS, help=launcher)
    option(how, "--master-addr", "NAME", "default: the hostfile's first host")
    option(how, "--master-port", "P", "default: a free one, or 29500 for several nodes", port)
    option(how, "--node-rank", "I", "start only node I, which is this machine", rank)
    dry_run = "print commands, layout, memory and communication; start nothing"
    how.add_argument("--dry-run", action="store_true", help=dry_run)


def _launch(arguments: argparse.Namespace) -> int:
    from hybrid.launch.plan import Request, plan

    given = {field.name: getattr(arguments, field.name) for field in fields(Request)}
    chosen = plan(Request(**given | {"overrides": tuple(arguments.overrides)}))
    recipe = _load_recipe(arguments, chosen.processes)
    if arguments.dry_run:
        from hybrid.launch.report import describe

        print(describe(chosen, recipe))
        return 0
    from hybrid.launch.start import start

    start(chosen, arguments.node_rank)


def _declare_verify(parser: Parser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="stored test vectors", type=path)
    option(parser, "--device", "NAME", "cpu (the default) or cuda", default="cpu")
    precision = "bf16 has wider tolerances"
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help=precision)


def _verify(arguments: argparse.Namespace) -> int:
    from hybrid.verify import Setting, verify

    return verify(arguments.folder, Setting(arguments.device, arguments.precision))


def _declare_generate(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory", type=path)
    text = parser.add_argument_group("prompts (none: start a new document)")
    repeated = "text to continue; repeat it for several; - reads one prompt from standard input"
    text.add_argument("--prompt", action="append", default=[], metavar="TEXT", help=repeated)
    option(text, "--prompts-file", "FILE", "one prompt a line; blank lines are skipped", path)
    spanning = "the prompts of the file may span lines and stand between lines that read exactly LINE"
    option(text, "--separator", "LINE", spanning)
    length = parser.add_argument_group("length")
    option(length, "--max-tokens", "N", "new tokens at most (%(default)s)", int, 128)
    stop = "end before this text; may be repeated"
    length.add_argument("--stop", action="append", default=[], metavar="TEXT", help=stop)
    sampling = parser.add_argument_group("sampling")
    option(sampling, "--temperature", "X", "0 is greedy (%(default)s)", float, 0.8)
    option(sampling, "--top-k", "K", "the K most probable only (0: off)", int, 0)
    option(sampling, "--top-p", "P", "the most probable up to this sum of probabilities (1: off)", float, 1.0)
    option(sampling, "--repetition-penalty", "X", "above 1 avoids repeats (1: off)", float, 1.0)
    option(sampling, "--seed", "N", "sample i of seed N is sample 0 of seed N + i", int, 0)
    option(sampling, "--samples", "N", "continuations of each prompt (%(default)s)", int, 1)
    option(parser, "--batch", "N", "sequences decoded side by side (%(default)s)", int, 16)
    state = parser.add_argument_group("long documents (one prompt; with --max-tokens 0 it is only read)")
    option(state, "--save-state", "FILE", "keep what the model remembers after prompt and continuation", path)
    option(state, "--load-state", "FILE", "go on from there; the prompt is what follows", path)


def _generate(arguments: argparse.Namespace) -> int:
    from .prompts import Printer, read_prompts, read_state

    prompts = read_prompts(arguments.prompt, arguments.prompts_file, arguments.separator)
    from hybrid.generate.sampling import Settings

    settings = {field.name: getattr(arguments, field.name) for field in fields(Settings)}
    Settings(**settings)  # what is wrong is found before the model is read
    resume = read_state(arguments.load_state, arguments.save_state, len(prompts), arguments.samples)
    from hybrid.generate import generate, load_model

    model, tokenizer = load_model(arguments.run)
    printer = Printer(prompts, arguments.samples) if arguments.max_tokens else None  # else it only reads
    generate(
        model,
        tokenizer,
        prompts,
        resume=resume and resume.to(model.head.weight.device),
        on_text=None if printer is None else printer.text,
        on_end=None if printer is None else printer.end,
        on_state=arguments.save_state and (lambda state: state.save(arguments.save_state)),
        **settings,
    )
    if arguments.save_state:
        size = os.path.getsize(arguments.save_state)
        print(f"state kept in {arguments.save_state} ({size / 1e6:.1f} MB)", file=sys.stderr)
    return 0


def _declare_inspect(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="what hybrid generate reads", type=path)
    parser.add_argument("--text", metavar="FILE", help="the text to read", type=path, required=True)
    option(parser, "--output", "FILE.html", "the page (%(default)s)", path, "inspect.html")
    option(parser, "--queries", "N", "tokens whose attention is shown (%(default)s)", count, 16)
    option(parser, "--layers", "I,J", "only these KVM layers, by number", layer_numbers)


def _inspect(arguments: argparse.Namespace) -> int:
    from hybrid.inspect import inspect

    where = arguments.model, arguments.text, arguments.output
    with progress_line() as say:
        report = inspect(*where, arguments.queries, arguments.layers, say)
    print(report)
    return 0


def _declare_convert(parser: Parser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="a run, checkpoint or model", type=path)
    parser.add_argument("dest", metavar="DEST", help="a new folder", type=path)
    changed = "model keys changed on the way (model.pattern=...), or keys of the source's own config"
    parser.add_argument("settings", metavar="key=value", nargs="*", help=changed)
    to = f"{', '.join(CONVERT_TO)} (default: %(default)s, what hybrid generate and train.init_from read)"
    parser.add_argument("--to", choices=CONVERT_TO, default="hybrid", metavar="FORMAT", help=to)
    known = f"{', '.join(CONVERT_FROM)} (default: by its content)"
    parser.add_argument("--from", choices=CONVERT_FROM, dest="source_format", metavar="FORMAT", help=known)
    option(parser, "--recipe", "RECIPE", "what the source was trained with, where it does not say")
    option(parser, "--shard-size", "SIZE", "bytes of a file at most", size, "4GB")
    alone = "with --to hf: put the model's code there too, to load where hybrid is not installed"
    parser.add_argument("--standalone", action="store_true", help=alone)
    unchecked = "do not compare tensors and logits of source and result"
    parser.add_argument("--no-check", action="store_true", help=unchecked)


def _convert(arguments: argparse.Namespace) -> int:
    from hybrid.convert.common import Options
    from hybrid.convert.convert import convert, describe

    if wrong := [text for text in arguments.settings if not text.partition("=")[1]]:
        raise UsageError(f"'{wrong[0]}' is no key=value")
    overrides = [text for text in arguments.settings if text.startswith("model.")]
    own = dict(text.split("=", 1) for text in arguments.settings if text not in overrides)
    dest = Path(arguments.dest)
    with progress_line() as say:
        report = convert(
            Path(arguments.source),
            dest,
            arguments.to,
            arguments.source_format,
            Options(arguments.recipe, own),
            overrides,
            arguments.shard_size,
            not arguments.no_check,
            arguments.standalone,
            say,
        )
    print(describe(report, dest))
    return 0


@contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """Give a function that shows its text in one line on a terminal, each in place of the last."""
    terminal = sys.stderr.isatty()
    say = partial(print, end="\033[K\r", file=sys.stderr, flush=True)
    yield say if terminal else lambda text: None
    if terminal:
        say("")


def _declare_bench(parser: Parser) -> None:
    _declare_recipe(parser)
    option(parser, "--output", "DIR", "keep model.json there", path)
    option(parser, "--threads", "N", "CPU threads (default: one per core)", count)


def _bench(arguments: argparse.Namespace) -> int:
    if arguments.recipe in ("kvm", "mixers", "scale"):  # subcommands until they became scripts
        raise UsageError(
            f"hybrid bench takes a RECIPE; '{arguments.recipe}' is measured by a script of the checkout: "
            f"python -m benchmarks.{arguments.recipe}, or make bench for all"
        )
    recipe = _load_recipe(arguments)
    keep_freed_memory()
    import torch

    from hybrid.train.benchmark import benchmark

    torch.set_num_threads(arguments.threads or len(os.sched_getaffinity(0)))
    benchmark(recipe, arguments.output)
    return 0


COMMANDS = {
    "train": Command(
        "Train a model; prepares its data first if it is not there.",
        "hybrid train recipes/quickstart.yaml train.steps=100 train.output=runs/short",
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
    "inspect": Command(
        "Write a page that shows where each token of a text is in a model's memory.",
        "hybrid inspect runs/quickstart --text README.md --output memory.html",
        _declare_inspect,
        _inspect,
    ),
    "convert": Command(
        "Convert a model from and to other formats; recognises the source, checks and reports the result.",
        "hybrid convert runs/quickstart exported --shard-size 2GB",
        _declare_convert,
        _convert,
    ),
    "verify": Command(
        "Compare this machine's results with stored test vectors; exit 1 when one differs.",
        "hybrid verify tests/vectors",
        _declare_verify,
        _verify,
    ),
    "bench": Command(
        "Measure what a recipe reaches on this machine: tokens/s, utilisation, memory, time by part.",
        "hybrid bench recipes/quickstart.yaml data.context=4096 --output bench",
        _declare_bench,
        _bench,
    ),
}
