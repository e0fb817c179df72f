"""The layout is the architecture: imports go one way, down, and `layers/` stands on torch alone.

All imports count, also those inside functions and those for type checkers only.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLOORS = (
    "layers",
    "errors",
    "text files paths",
    "recipe",
    "model",
    "data",
    "distributed",
    "checkpoint",
    "estimate",
    "generate",
    "train",
    "convert",
    "evaluate inspect verify launch",
    "cli",
    "__main__",
)
"""Rooms of `hybrid` from the ground up. A room may import from those below it and within itself."""
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms.split()}
LIGHT = "layers.errors"
"""The one module of layers that `errors` stands on; it imports nothing but the standard library."""


def _name(path: Path) -> str:
    """A file's module name below `hybrid`; `layers/` is imported as `hybrid.layers`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "layers" else parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {_name(path): path for top in ("hybrid", "layers") for path in (ROOT / top).rglob("*.py")}


def _absolute(node: ast.ImportFrom, module: str, path: Path) -> str:
    """The module that `from ... import` names, as the interpreter would resolve it."""
    if not node.level:
        return node.module or ""
    package = ["hybrid", *module.split(".")] if module else ["hybrid"]
    depth = node.level - (path.name == "__init__.py")
    base = package[: len(package) - depth] if depth else package
    return ".".join([*base, *([node.module] if node.module else [])])


def _imports(module: str) -> Iterator[tuple[str, int]]:
    """List a file's imports with their lines (of `from a import b` the module a.b where there is one)."""
    path = FILES[module]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, path)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield (inner if inner.removeprefix("hybrid.") in FILES else base), node.lineno


def _own(module: str) -> Iterator[tuple[str, int]]:
    """The imports of our own files."""
    for name, line in _imports(module):
        if name == "hybrid" or name.startswith("hybrid."):
            yield name.removeprefix("hybrid").removeprefix("."), line


def _room(module: str) -> str:
    return module.partition(".")[0]


def test_every_room_has_its_floor() -> None:
    assert {_room(module) for module in FILES} - {""} == set(FLOOR)


def test_no_import_goes_up() -> None:
    wrong = [
        f"{FILES[module].relative_to(ROOT)}:{line} imports {found}"
        for module in FILES
        if module
        for found, line in _own(module)
        if found and found != LIGHT and _room(found) != _room(module)
        if FLOOR[_room(found)] >= FLOOR[_room(module)]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = {module: {found for found, _ in _own(module)} - {module} for module in FILES}
    for module in graph:  # a package hands names of its files on: files import each other, not through it
        if FILES[module].name == "__init__.py":
            graph[module] = set()
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for found in sorted(graph.get(module, ())):
                visit(found, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_layers_stand_on_torch_alone() -> None:
    optional = {"flash_attn", "fla", "triton"}  # kernels that are used where they are installed
    allowed = {"torch", *sys.stdlib_module_names, *optional}
    wrong = [
        f"{FILES[module].relative_to(ROOT)}:{line} imports {found}"
        for module in FILES
        if _room(module) == "layers"
        for found, line in _imports(module)
        if not found.startswith("hybrid.layers") and found.partition(".")[0] not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_the_errors_of_layers_cost_no_torch() -> None:
    assert all(found.partition(".")[0] in sys.stdlib_module_names for found, _ in _imports(LIGHT))
