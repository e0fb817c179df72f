"""The example layer of docs/layers.md, laid out as an installer leaves a package with an entry point.

Under another name, so that who tries the example meets no other of that name.
"""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "layers.md"
KIND = "third_party_average"


def install(folder: Path) -> None:
    """Write the module and its metadata into `folder`, which has to be on the path."""
    (code,) = re.findall(r"```python\n(# layers/average\.py\n.*?)```", PAGE.read_text(), re.S)
    code = code.replace("average", KIND).replace("Average", "ThirdPartyAverage")
    (folder / f"{KIND}.py").write_text(code)
    info = folder / "average_layer-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: average-layer\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[hybrid.layers]\n{KIND} = {KIND}:ThirdPartyAverage\n")
