"""Recipe files and command-line overrides -> plain nested tables, and where each key was written.

Every scalar stays the text it was written as (or None for an unquoted null): what it means is decided
later by the type of the field it fills.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from hybrid.errors import UserError

Key = tuple[str, ...]
Tree = dict[str, Any]
SUFFIXES = (".yaml", ".yml", ".json")

_NULL = {"", "~", "null", "Null", "NULL"}


class RecipeError(UserError):
    """Everything that is wrong with a recipe; `problems` has one text each."""

    def __init__(self, problems: Sequence[str], name: str | None = None) -> None:
        self.problems = list(dict.fromkeys(problems))
        what = f"recipe {name}" if name else "the recipe"
        count = "a problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        lines = [problem.replace("\n", "\n    ") for problem in self.problems]
        super().__init__(f"{what} has {count}:" + "".join(f"\n  - {line}" for line in lines))


def dotted(key: Key) -> str:
    return ".".join(key)


class Source:
    """The merged tables of a recipe file, its bases and the overrides, as `layers` from base to override."""

    def __init__(self, path: str | Path, overrides: Sequence[str] = ()) -> None:
        self.layers: list[Tree] = []
        self.places: dict[Key, str] = {}
        self.overridden: set[Key] = set()
        self.problems: list[str] = []
        self._read_with_bases(find(path), [])
        self.layers.reverse()
        places = self.places
        self.places = {}
        for override in overrides:
            self._read_override(override)
        self.overridden = set(self.places)
        self.places = places | self.places

    def where(self, key: Key) -> str:
        """`key`, with the place it was written at, or that of the table it is missing from."""
        inside = (place for written, place in self.places.items() if written[: len(key)] == key)
        if place := self.places.get(key) or next(inside, None):
            return f"{dotted(key)} ({place})"
        for length in range(len(key), 0, -1):
            if place := self.places.get(key[:length]):
                return f"{dotted(key)} ({place})"
        return dotted(key)

    def _read_with_bases(self, path: Path, seen: list[Path]) -> None:
        """Own file first, then the file it is based on; the earlier entry of `layers` wins."""
        resolved = path.resolve()
        if resolved in seen:
            chain = " -> ".join(p.name for p in [*seen[seen.index(resolved) :], resolved])
            raise RecipeError([f"base: the files name one another in a circle: {chain}"], path.name)
        tree, places = _Reader(path, self.problems).read()
        base = tree.pop("base", None)
        places.pop(("base",), None)
        self.layers.append(tree)
        self.places = places | self.places
        if base is None:
            return
        if not isinstance(base, str):
            raise RecipeError([f"base ({path.name}): expected the name of one recipe file"], path.name)
        self._read_with_bases(find(base, path.parent, f"base ({path.name})"), [*seen, resolved])

    def _read_override(self, override: str) -> None:
        name, equals, value = override.partition("=")
        key = tuple(name.strip().split("."))
        if not equals or not all(key):
            self.problems.append(f"override {override!r}: write key=value, such as optimizer.lr=1e-3")
            return
        if key == ("base",):
            self.problems.append("override 'base': a base can only be named in a recipe file")
            return
        tree: Any = _override_value(value)
        self._mark(tree, key, "command line")
        for part in reversed(key):
            tree = {part: tree}
        self.layers.append(tree)

    def _mark(self, value: Any, key: Key, place: str) -> None:
        self.places[key] = place
        if isinstance(value, dict):
            for name, inner in value.items():
                self._mark(inner, (*key, name), place)


def _override_value(text: str) -> Any:
    """Quotes are taken off, [lists] and {tables} are read as YAML; everything else stays as it is."""
    if text in _NULL:
        return None
    if text[:1] + text[-1:] in ("[]", "{}", '""', "''") and len(text) > 1:
        try:
            return _plain(yaml.compose(text, Loader=yaml.BaseLoader))
        except (yaml.YAMLError, RecipeError, RecursionError):
            return text
    return text


def _plain(node: yaml.Node) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return None if node.style is None and node.value in _NULL else node.value
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item) for item in node.value]
    return {str(key.value): _plain(value) for key, value in node.value}


class _Reader:
    """One YAML or JSON file -> (tree, places)."""

    def __init__(self, path: Path, problems: list[str]) -> None:
        self.path = path
        self.problems = problems
        self.places: dict[Key, str] = {}

    def read(self) -> tuple[Tree, dict[Key, str]]:
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError([f"cannot be read: {error}"], str(self.path)) from None
        try:
            tree = self._json(text) if self.path.suffix == ".json" else self._yaml(text)
        except yaml.YAMLError as error:
            raise RecipeError([f"not YAML: {_yaml_words(error)}"], str(self.path)) from None
        except json.JSONDecodeError as error:
            raise RecipeError([f"not JSON: line {error.lineno}: {error.msg}"], str(self.path)) from None
        except RecursionError:
            raise RecipeError(["nested too deeply"], str(self.path)) from None
        if not isinstance(tree, dict):
            raise RecipeError(["a recipe is a table of sections (model, data, ...)"], str(self.path))
        return tree, self.places

    def _yaml(self, text: str) -> Any:
        for event in yaml.parse(text, Loader=yaml.BaseLoader):
            if isinstance(event, yaml.AliasEvent):
                line = f"line {event.start_mark.line + 1}"
                words = f"{line}: YAML aliases (*{event.anchor}) are not supported; write ${{section.key}}"
                raise RecipeError([words], str(self.path))
        node = yaml.compose(text, Loader=yaml.BaseLoader)
        return {} if node is None else self._walk(node, ())

    def _walk(self, node: yaml.Node, key: Key) -> Any:
        line = node.start_mark.line + 1
        if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.rpartition(":")[2] not in (
            "str",
            "seq",
            "map",
        ):
            raise RecipeError(
                [f"line {line}: YAML tags such as {node.tag} are not supported"], str(self.path)
            )
        if isinstance(node, yaml.ScalarNode):
            return _plain(node)
        if isinstance(node, yaml.SequenceNode):
            return [self._walk(item, key) for item in node.value]
        pairs = [(str(name.value), value, name.start_mark.line + 1) for name, value in node.value]
        tree = {}
        for name, value, line in pairs:
            inner = (*key, name)
            if name in tree:
                self.problems.append(f"{dotted(inner)} ({self.path.name}:{line}): written twice")
            self.places[inner] = f"{self.path.name}:{line}"
            tree[name] = self._walk(value, inner)
        return tree

    def _json(self, text: str) -> Any:
        def table(pairs: list[tuple[str, Any]]) -> Tree:
            tree = dict(pairs)
            names = [name for name, _ in pairs]
            for name in {name for name in names if names.count(name) > 1}:
                self.problems.append(f"{name} ({self.path.name}): written twice")
            return tree

        tree = json.loads(text, parse_float=str, parse_int=str, parse_constant=str, object_pairs_hook=table)
        return self._note(tree, ())

    def _note(self, value: Any, key: Key) -> Any:
        if key:
            self.places[key] = self.path.name
        if isinstance(value, dict):
            return {name: self._note(inner, (*key, name)) for name, inner in value.items()}
        if isinstance(value, list):
            return [self._note(item, key) for item in value]
        return value


def _yaml_words(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return f"line {mark.line + 1}: {problem}" if mark else problem


def shipped() -> list[str]:
    """Names of the recipes that come with the package."""
    root = _shipped_folder()
    return sorted(path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml"))


def _shipped_folder() -> Path:
    # not a zip: the package declares no zip-safety and pip installs files
    return Path(str(resources.files("hybrid.recipes")))


def find(name: str | Path, folder: Path | None = None, asked_by: str | None = None) -> Path:
    """The file a name means: a path (relative to `folder`), or a shipped recipe such as `quickstart`."""
    path = (folder or Path()) / Path(name).expanduser()
    if path.is_file():
        return path
    inside = _shipped_folder() / (str(name) if str(name).endswith(SUFFIXES) else f"{name}.yaml")
    if not Path(name).is_absolute() and ".." not in Path(name).parts and inside.is_file():
        return inside
    start = f"{asked_by}: " if asked_by else ""
    raise RecipeError(
        [
            f"{start}no file {path} and no shipped recipe of that name{_nearest_file(path)}; "
            f"shipped: {', '.join(shipped())}"
        ],
        str(name),
    )


def _nearest_file(path: Path) -> str:
    """'; did you mean ...?' from the files beside `path`, those in ./recipes and the shipped recipes."""
    beside = [file for folder in (path.parent, Path("recipes")) for file in sorted(folder.glob("*.[yj]*"))]
    known = {name.rpartition("/")[2]: name for name in shipped()}
    known |= {file.stem: str(file) for file in reversed(beside) if file.suffix in SUFFIXES}
    near = difflib.get_close_matches(path.stem, known, n=1)
    return f"; did you mean {known[near[0]]}?" if near else ""
