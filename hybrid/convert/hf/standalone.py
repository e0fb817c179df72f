"""The code of a model of ours in its Hugging Face folder, to load where this package is not installed.

transformers copies what a folder's `configuration_*.py` and `modeling_*.py` reach by `from .name import`, in
one flat folder. So every module that they import becomes a file there (hybrid/layers/kvm/walk.py becomes
`layers_kvm_walk.py`), and its imports of ours are rewritten; nothing else of it changes.

Of layers the model's own kinds go along. KVM's kernels in Triton do not: transformers would ask for triton on
every machine that loads the folder from the Hub. On a GPU torch's operators compute instead.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from importlib.util import find_spec, resolve_name
from pathlib import Path
from types import ModuleType

from safetensors.torch import load_file, save_file
from torch import Tensor

from hybrid import layers
from hybrid.errors import ConvertError, NotSupported
from hybrid.files import write_json, write_text
from hybrid.recipe.config_json import CONFIG, MODEL_TYPE, read_config
from hybrid.recipe.schema import ModelSection

PACKAGE = "hybrid."
LAYERS, REGISTRY = layers.__name__, f"{layers.__name__}.registry"
ROOTS = {"AutoConfig": "configuration.HybridConfig", "AutoModelForCausalLM": "modeling.HybridForCausalLM"}
"""Class of transformers -> ours, in this package."""
WITHOUT_PACKAGE = """
import sys
sys.modules["hybrid"] = None  # as if it were not installed
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
folder, ids, out = sys.argv[1:]
options = {"dtype": torch.float32, "local_files_only": True, "trust_remote_code": True}
model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
with torch.no_grad():
    save_file({"logits": model(load_file(ids)["ids"], use_cache=False).logits.float()}, out)
"""


def add_code(folder: Path, section: ModelSection) -> None:
    """Write the code that a model needs into its folder, and where transformers finds it into config.json.

    NotSupported for layers of other packages, whose code is not ours to copy.
    """
    files = {}
    waiting = [f"{__package__}.{place.partition('.')[0]}" for place in ROOTS.values()]
    for module in waiting:  # grows
        text, needed = _flattened(module, _source(module, section))
        files[_flat(module)] = text
        waiting += [name for name in dict.fromkeys(needed) if name not in waiting]
    for name, text in files.items():
        write_text(folder / f"{name}.py", text)
    auto_map = {auto: place.replace(".", f"_{MODEL_TYPE}.") for auto, place in ROOTS.items()}
    write_json(folder / CONFIG, read_config(folder) | {"auto_map": auto_map})


def _source(module: str, section: ModelSection) -> str:
    """Read a module's source, with what finds layers by the files that are there replaced by imports."""
    text = Path(str(_spec(module).origin)).read_text(encoding="utf-8")
    if module == LAYERS:
        lazy = [f"from .{place} import {name}" for name, place in layers._MODULES.items()]
        eager = ["from .errors import LayerError, UserError, require", *lazy]
        return '"""Token mixers, their contract and their registry."""\n\n' + "\n".join(eager) + "\n"
    if module == REGISTRY:
        discover = next(node for node in ast.parse(text).body if getattr(node, "name", "") == "_discover")
        lines = text.splitlines()
        lines[discover.lineno : discover.end_lineno] = [f"    {line}" for line in _mixers(section)]
        return "\n".join(lines) + "\n"
    return text


def _mixers(section: ModelSection) -> Iterator[str]:
    """Import the mixer of every kind in a model."""
    for kind in sorted({entry["kind"] for entry in section.layers.values()}):
        mixer = layers.mixer_class(kind)
        if not mixer.__module__.startswith(f"{LAYERS}."):
            raise NotSupported(
                f"layer kind '{kind}' is of another package ({mixer.__module__}): --standalone carries kinds "
                "of this package only"
            )
        yield f"from {mixer.__module__} import {mixer.__name__}"


def _flattened(module: str, text: str) -> tuple[str, list[str]]:
    """Rewrite a module's imports of ours for a flat folder; also returns the modules that it needs."""
    package = module if _spec(module).submodule_search_locations else module.rpartition(".")[0]
    lines, needed = text.splitlines(keepends=True), []
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    for node in sorted(imports, key=lambda node: -node.lineno):
        base = resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module
        if not f"{base}.".startswith(PACKAGE):
            continue
        assert base is not None
        assert node.end_lineno is not None
        written, names = [], []
        for alias in node.names:
            if _is_module(base, alias.name):
                needed.append(f"{base}.{alias.name}")
                flat = _flat(needed[-1])
                written.append(f"from .{flat} import __name__ as _")  # by this transformers finds the file
                written.append(f"from . import {flat} as {alias.asname or alias.name}")
            else:
                names.append(alias.name + (f" as {alias.asname}" if alias.asname else ""))
        if names:
            needed.append(base)
            written.append(f"from .{_flat(base)} import {', '.join(names)}")
        before = lines[node.lineno - 1][: node.col_offset]
        after = lines[node.end_lineno - 1][node.end_col_offset :]
        lines[node.lineno - 1 : node.end_lineno] = [before + "; ".join(written) + after]
    origin = module.replace(".", "/") + ("/__init__.py" if package == module else ".py")
    note = f"# From kvm-hybrid {version('kvm-hybrid')}: {origin}. SPDX-License-Identifier: Apache-2.0\n"
    return note + "".join(lines), needed


def _is_module(base: str, name: str) -> bool:
    """Whether `from base import name` gives a module: one of a package's names may hide one."""
    if not _spec(base).submodule_search_locations:
        return False
    return isinstance(getattr(__import__(base, fromlist=[name]), name), ModuleType)


def _spec(module: str) -> ModuleSpec:
    found = find_spec(module)
    assert found is not None
    return found


def _flat(module: str) -> str:
    """Name the file that a module becomes."""
    name = module.removeprefix(PACKAGE).removeprefix("convert.hf.")
    return f"{name}_{MODEL_TYPE}" if module.startswith(f"{__package__}.") else name.replace(".", "_")


def logits(path: Path, ids: Tensor) -> Tensor:
    """Compute logits by the code that a folder carries, in a process that does not know this package."""
    with tempfile.TemporaryDirectory() as scratch:
        given, out = (str(Path(scratch, name)) for name in ("ids", "logits"))
        save_file({"ids": ids}, given)
        environment = os.environ | {"HF_MODULES_CACHE": scratch, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [sys.executable, "-P", "-c", WITHOUT_PACKAGE, str(path), given, out],
            env=environment, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise ConvertError(f"{path} does not load by itself: {last}")
        return load_file(out)["logits"]
