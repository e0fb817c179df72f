"""Recipe files and `key=value` overrides -> nested tables of text, and the place where each key was written.

Every scalar stays the text it was written as (None for an unquoted null): what it means is decided later by
the type of the key.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from importlib import resources
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from hybrid.layers.errors import did_you_mean
from hybrid.paths import local_path
from hybrid.text import decode

from .problems import Problem, RecipeError, Tree, join

Lines = dict[str, list[int]]
"""Key, as "section.key" -> every line where it is written."""

COMMAND_LINE = "command line"
SUFFIXES = (".yaml", ".yml", ".json")
_SHIPPED = Path(str(resources.files("hybrid.recipes")))
_NULL = {"", "~", "null", "Null", "NULL"}
_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")}


class RecipeText:
    """A recipe as it is written: `tables` of text, from the file it is based on to the last override."""

    def __init__(self, path: str | Path, overrides: Sequence[str] = ()) -> None:
        self.tables: list[Tree] = []
        self.places: dict[str, str] = {}
        self.problems: list[str] = []
        self._read_file(find(path), ())
        for override in overrides:
            self._read_override(override)

    def locate(self, problem: Problem) -> str:
        """Describe a problem with the place of its key, or of the table that the key is missing from."""
        key = problem.key
        while key and key not in self.places:
            key = key.rpartition(".")[0]
        return f"{problem.key} ({self.places[key]}): {problem.words}" if key else str(problem)

    def _read_file(self, path: Path, based_on_it: tuple[Path, ...]) -> None:
        resolved = path.resolve()
        if resolved in based_on_it:
            circle = [*based_on_it[based_on_it.index(resolved) :], resolved]
            names = " -> ".join(file.name for file in circle)
            raise RecipeError([f"base: the files name one another in a circle: {names}"], path.name)
        lines: Lines = defaultdict(list)
        table = _read_table(path, lines)
        base = table.pop("base", None)
        if isinstance(base, str):
            self._read_file(find(base, path.parent, f"base ({path.name}): "), (*based_on_it, resolved))
        elif base is not None:
            raise RecipeError([f"base ({path.name}): expected the name of one recipe file"], path.name)
        self.tables.append(table)
        self.places |= {key: f"{path.name}:{at[-1]}" for key, at in lines.items()}
        self._refuse_twice(lines, ", in lines {}")

    def _refuse_twice(self, lines: Lines, where: str) -> None:
        for key, at in lines.items():
            if len(at) > 1:
                words = "written twice" if len(at) == 2 else f"written {len(at)} times"
                words += where.format(" and ".join(map(str, at)))
                self.problems.append(f"{key} ({self.places[key]}): {words}")

    def _read_override(self, override: str) -> None:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")):
            self.problems.append(f"override {override!r}: write key=value, such as optimizer.lr=1e-3")
            return
        if key == "base":
            self.problems.append("override 'base': a base can only be named in a recipe file")
            return
        tables = [table for table in accumulate(key.split("."), join) if table not in self.places]
        self.places |= dict.fromkeys([*tables, key], COMMAND_LINE)
        tree: Any = None if text in _NULL else text
        if text[:1] + text[-1:] in ("[]", "{}", '""', "''") and len(text) > 1:
            with suppress(yaml.YAMLError, RecursionError):  # else it is a text like any other
                lines: Lines = defaultdict(list)
                tree = _plain(yaml.compose(text, _Loader), key, lines)
                self.places |= dict.fromkeys(lines, COMMAND_LINE)
                self._refuse_twice(lines, "")
        for name in reversed(key.split(".")):
            tree = {name: tree}
        self.tables.append(tree)


def _read_table(path: Path, lines: Lines) -> Tree:
    """Read a YAML or JSON file. RecipeError says why it cannot be read."""
    try:
        text = decode(path.read_bytes())
        if path.suffix == ".json":
            json.loads(text)  # what is no JSON may still be YAML
            # to YAML a tab is no white space, and some characters end a line or are not printable
            text = text.translate({9: " ", 127: r"\x7f"}).encode("ascii", "backslashreplace").decode()
        node = yaml.compose(text, _Loader)
        tree = {} if node is None else _plain(node, "", lines)
        words = None if isinstance(tree, dict) else "a recipe is a table of sections (model, data, ...)"
    except OSError as error:
        words = f"cannot be read: {error}"
    except json.JSONDecodeError as error:
        words = f"not JSON: line {error.lineno}: {error.msg}"
    except ValueError as error:
        words = str(error)
    except _UnsupportedError as error:
        words = str(error)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        words = f"not YAML: line {mark.line + 1}: {error.problem}" if mark else f"not YAML: {error}"
    except RecursionError:
        words = "nested too deeply"
    if words:
        raise RecipeError([words], str(path))
    return tree


class _UnsupportedError(yaml.YAMLError):
    """YAML that recipes are not written in."""


class _Loader(yaml.BaseLoader):
    """Compose nodes of text, refusing aliases and tags."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        line = f"line {event.start_mark.line + 1}: YAML"
        if isinstance(event, yaml.AliasEvent):
            words = f"aliases (*{event.anchor}) are not supported; write ${{section.key}}"
            raise _UnsupportedError(f"{line} {words}")
        node = super().compose_node(parent, index)
        if node is not None and node.tag not in _TAGS:
            raise _UnsupportedError(f"{line} tags such as {node.tag} are not supported")
        return node


def _plain(node: yaml.Node, key: str, lines: Lines) -> Any:
    """Convert a node to texts, lists and tables; `lines` takes the keys."""
    if isinstance(node, yaml.ScalarNode):
        if node.style is None and node.value in _NULL:
            return None
        # JSON writes a character beyond U+FFFF as two escapes
        return node.value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, f"{key}.{index}", lines) for index, item in enumerate(node.value)]
    tree: Tree = {}
    for name_node, value in node.value:
        inner = join(key, str(name_node.value))
        lines[inner].append(name_node.start_mark.line + 1)
        tree[str(name_node.value)] = _plain(value, inner, lines)
    return tree


def shipped() -> list[str]:
    """List the names of the recipes that come with the package."""
    return sorted(path.relative_to(_SHIPPED).with_suffix("").as_posix() for path in _SHIPPED.rglob("*.yaml"))


def find(name: str | Path, folder: Path | None = None, asked_by: str = "") -> Path:
    """Find the file a name means: a path (relative to `folder`), or a shipped recipe such as `quickstart`."""
    try:
        path = (folder or Path()) / local_path(str(name))
    except ValueError as error:
        raise RecipeError([f"{asked_by}{error}"], str(name)) from None
    if path.is_file():
        return path
    inside = _SHIPPED / (str(name) if str(name).endswith(SUFFIXES) else f"{name}.yaml")
    if not Path(name).is_absolute() and ".." not in Path(name).parts and os.path.isfile(inside):
        return inside
    # the files beside it, those in ./recipes, and the shipped recipes, by their last name
    beside = [file for place in (path.parent, Path("recipes")) for file in sorted(place.glob("*.[yj]*"))]
    known = {name.rpartition("/")[2]: name for name in shipped()}
    known |= {file.stem: str(file) for file in reversed(beside) if file.suffix in SUFFIXES}
    words = f"no file {path} and no shipped recipe of that name{did_you_mean(path.stem, known, shown=known)}"
    raise RecipeError([f"{asked_by}{words}; shipped: {', '.join(shipped())}"], str(name))
