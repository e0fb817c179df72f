"""The commands of `hybrid`: parse, call, print. Each imports the heavy packages it needs when it runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields

from .arguments import Parser, UsageError, count, part, port, rank
from .processor import keep_freed_memory


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
    from hybrid.data import prepare

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
    where.add_argument("--nodes", type=count, metavar="N", help="default: 1, or every host of the hostfile")
    where.add_argument(
        "--gpus",
        type=count,
        metavar="M",
        help="processes on a node; default: its GPUs or hostfile slots",
    )
    where.add_argument("--hostfile", metavar="FILE", help="lines `NAME slots=N`, the first is the master")
    filters = "hosts and slots of the hostfile, such as 'worker-0@worker-1:0,2'"
    where.add_argument("--include", default="", metavar="FILTER", help=f"only these {filters}")
    where.add_argument("--exclude", default="", metavar="FILTER", help="all but these")
    how = parser.add_argument_group("how")
    how.add_argument(
        "--launcher",
        choices=LAUNCHERS,
        help="default: deepspeed, or torchrun for nodes without a hostfile",
    )
    how.add_argument("--master-addr", metavar="NAME", help="default: the hostfile's first host")
    how.add_argument(
        "--master-port",
        type=port,
        metavar="P",
        help="default: a free one, or 29500 for several nodes",
    )
    how.add_argument("--node-rank", type=rank, metavar="I", help="start only node I, which is this machine")
    how.add_argument(
        "--dry-run",
        action="store_true",
        help="print commands, layout, memory and communication; start nothing",
    )


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
    parser.add_argument("folder", metavar="FOLDER", help="stored test vectors")
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu (the default) or cuda")
    parser.add_argument(
        "--precision", choices=("fp32", "bf16"), default="fp32", help="bf16 has wider tolerances"
    )


def _verify(arguments: argparse.Namespace) -> int:
    from hybrid.verify import Setting, verify

    return verify(arguments.folder, Setting(arguments.device, arguments.precision))


def _declare_generate(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory")
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
    keep_freed_memory()
    from hybrid.bench import run

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
