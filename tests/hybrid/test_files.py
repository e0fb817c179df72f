"""Files are written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid.files import replacing


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    full = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 (closed below)
    with full, pytest.raises(OSError, match="No space left on device") as caught, replacing(tmp_path / "a"):
        full.write(b"x")
    assert caught.value.filename == str(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
