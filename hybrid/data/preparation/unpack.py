"""Opening files, compressed ones too: one loop for all compressions, which tells damage from limits."""

from __future__ import annotations

import bz2
import io
import lzma
import os
import zlib
from collections.abc import Callable
from typing import IO, Any

import zstandard

from hybrid.errors import DataError

DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    "gzip": lambda: zlib.decompressobj(wbits=31),
    # 2 GiB is the largest window there is; a frame takes the memory of its own
    "zstd": lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj(),
    "bzip2": bz2.BZ2Decompressor,
    "xz": lzma.LZMADecompressor,
}
PACKED_SUFFIXES = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bzip2", ".xz": "xz"}
"""Ending of a compressed file's name, in any case -> compression."""
SIGNATURES = {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd", "bzip2": b"BZh", "xz": b"\xfd7zXZ\0"}
"""Compression -> the first bytes of its files."""

READ = 1 << 15
"""Compressed bytes unpacked at once."""


class Damaged(Exception):
    """The content of a compressed file cannot be read, or not to its end."""


def compression_of(path: str) -> str | None:
    """Find the ending that says how a file is compressed, in lower case; None: it is not."""
    return next((suffix for suffix in PACKED_SUFFIXES if path.lower().endswith(suffix)), None)


def open_unpacked(path: str) -> IO[bytes]:
    """Open a file to read what it holds. Reading raises Damaged, and DataError when memory is too small."""
    suffix = compression_of(path)
    if suffix is None:
        return open(path, "rb")
    return io.BufferedReader(_Unpacked(path, PACKED_SUFFIXES[suffix]), 1 << 16)


class _Unpacked(io.RawIOBase):
    """The content of a compressed file of one or several frames (gzip calls them members, xz streams)."""

    def __init__(self, path: str, compression: str) -> None:
        self._path, self._compression = path, compression
        self._file = open(path, "rb")  # noqa: SIM115 (closed with this object)
        self._frame: Any = None
        self._frames = 0
        self._left = self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            packed = self._left or self._file.read(READ)
            self._left = b""
            if self._frame is None and self._frames:
                packed = packed.lstrip(b"\0") if packed else b""  # padding between and after frames
                if not packed and self._file.peek(1):
                    continue
            if not packed:
                if self._frame is not None or not self._frames:
                    raise Damaged("it ends too early")
                return 0
            self._unpack(packed)
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _unpack(self, packed: bytes) -> None:
        if self._frame is None:
            self._frame = DECOMPRESSORS[self._compression]()
            self._frames += 1
        try:
            self._ready = self._frame.decompress(packed)
        except MemoryError:
            raise self._too_large() from None
        except (zlib.error, zstandard.ZstdError, lzma.LZMAError, EOFError, OSError, ValueError) as error:
            if "memory" in str(error).lower():
                raise self._too_large() from None
            place = f"before byte {self._file.tell():,} of {os.path.getsize(self._path):,}"
            raise Damaged(f"{error}; {place} of the file") from None
        if self._frame.eof:  # another frame may follow
            self._left, self._frame = self._frame.unused_data, None

    def _too_large(self) -> DataError:
        return DataError(
            f"{self._path}: unpacking it needs more memory than there is (it is not damaged); use fewer "
            "data.prepare_processes, or unpack it first"
        )

    def close(self) -> None:
        self._file.close()
        super().close()
