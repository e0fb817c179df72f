"""Token shards: what is written for each unit of input, and how it is read.

A unit is one file, or a run of small text files. It becomes three files in `<folder>/<source>/`:
    NAME.tokens      ids, little-endian uint16 (vocabularies of up to 65536 ids) or uint32; every document is
                     begin id + tokens + end id, so that each token of text is predicted once
    NAME.index.npy   uint64 [documents, 3]: ids, UTF-8 bytes, hash of the content
    NAME.json        counts, what was left out, checksums; written last: a unit with this file is finished
"""

from __future__ import annotations

import hashlib
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybrid.data.tokenizer import Tokenizer
from hybrid.errors import DataError
from hybrid.files import damaged, read_json, replacing, sha256, write_json
from hybrid.recipe.schema import SourceSection

from .inputs import Input, Skips
from .readers import read_documents

FORMAT = 1
IDS, BYTES, HASH = range(3)
"""Columns of the index."""


@dataclass(frozen=True)
class Unit:
    """Files that become one shard."""

    source: str
    name: str
    inputs: tuple[Input, ...]

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(item.size for item in self.inputs)

    def sidecar(self, folder: Path) -> Path:
        """Name the file that marks the unit as finished."""
        return sidecar(folder, self.source, self.name)


def make_units(source: str, inputs: list[Input]) -> list[Unit]:
    """Put a source's files into units: small text files in a row, about 1 MiB of them together (a thousandth
    of the source when that is more), every other file alone. Depends on the files' order, names and sizes
    only."""
    target = max(1 << 20, sum(item.size for item in inputs) // 1000)
    units: list[list[Input]] = []
    room = -1
    for item in inputs:
        alone = item.format != "text" or item.size >= target
        if alone or item.size > room:
            units.append([])
            room = target
        units[-1].append(item)
        room = -1 if alone else room - item.size
    return [Unit(source, f"{n:05d}-{_stem(unit[0])}", tuple(unit)) for n, unit in enumerate(units)]


def _stem(item: Input) -> str:
    name = Path(item.label.replace(":", "/")).name.split(".")[0]
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in name)[:40]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Choose two bytes an id where they suffice, else four; little-endian."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def content_hash(data: bytes) -> int:
    """Hash a document to 64 bits, which say on which side of the train/validation split it is."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def held_out(hashes: NDArray[np.uint64], share: float) -> NDArray[np.bool_]:
    """Choose the documents of a source that are held out for validation, by their content hashes.

    Those whose hash lies in the lowest `share` of all values. When that is none although a share was asked
    for, the one with the lowest hash; when it is all although less was asked for, all but the one with the
    highest (so a source's only document is never held out). Equal documents go the same way.
    """
    if not 0 <= share <= 1:
        raise DataError(f"a source's validation share is {share}; it must be from 0 to 1")
    if share == 1:
        return np.ones(len(hashes), bool)
    mask = hashes < np.uint64(int(share * 2**64))
    if mask.all():
        return mask if not len(hashes) else hashes < hashes.max()
    if share > 0 and not mask.any() and len(np.unique(hashes)) > 1:
        mask = hashes == hashes.min()
    return mask


def fingerprint_of(index: NDArray[np.uint64]) -> str:
    """Hash the rows of an index: with the tokenizer's, they say what the documents hold and in which order,
    however they are divided into shards and wherever these lie."""
    return hashlib.sha256(np.ascontiguousarray(index, "<u8").data).hexdigest()


def unit_settings(section: SourceSection, tokenizer: Tokenizer) -> dict[str, Any]:
    """List what a shard's bytes depend on beside its inputs."""
    return {"format": FORMAT, "tokenizer": tokenizer.fingerprint, "text_key": section.text_key}


def sidecar(folder: Path, source: str, name: str) -> Path:
    """Name the JSON file of a shard."""
    return folder / source / f"{name}.json"


SIDECAR = {
    **{"format": int, "tokenizer": str, "text_key": str, "dtype": str, "documents": int, "tokens": int},
    **{"bytes": int, "bad": int, "skipped": dict, "skipped_places": list, "files": list},
}
SOURCE_FILE = {"label", "size", "changed", "sha256"}
SAMPLED = 1 << 18
"""Bytes at each of the three places where a file is sampled."""
OTHER_CONTENTS = "has other contents than were written (SHA-256); prepare again with --force"


def read_sidecar(path: Path) -> dict[str, Any]:
    """Read what `build` wrote. Raises DataError when the file is damaged or of another format."""
    form = read_json(path, {"format": int})["format"]
    if form != FORMAT:
        raise DataError(f"{path} has shard format {form}, this version reads {FORMAT}; prepare it again")
    info = read_json(path, SIDECAR)
    if info["dtype"] not in ("<u2", "<u4"):
        raise damaged(path, f"'dtype' is {info['dtype']!r}")
    if not all(isinstance(entry, dict) and entry.keys() >= SOURCE_FILE for entry in info["files"]):
        raise damaged(path, "'files' holds something else")
    return info


class TokenFile(NamedTuple):
    """Where a shard's ids are; `inode` and `changed` tell whether the file has been made anew since."""

    path: str
    dtype: str
    inode: int
    changed: int
    sha256: str | None
    """Checksum; None for what an earlier version prepared."""

    def fault(self) -> str | None:
        """Read the whole file and compare it with its checksum: say what is wrong, if anything is."""
        if self.sha256 is None or sha256(Path(self.path)) == self.sha256:
            return None
        return f"{self.path} {OTHER_CONTENTS}"


def open_shard(folder: Path, source: str, name: str, tokenizer: str) -> tuple[NDArray[np.uint64], TokenFile]:
    """Read the index of a finished unit and find its ids. Raises DataError when its three files do not fit
    together, the index not its checksum, or `tokenizer` is not the fingerprint they were made with."""
    path = sidecar(folder, source, name)
    if not path.is_file():
        raise DataError(f"{path} is missing; run `hybrid prepare`")
    info = read_sidecar(path)
    if info["tokenizer"] != tokenizer:
        raise DataError(
            f"{path} was made with another tokenizer ({info['tokenizer'][:12]}, not {tokenizer[:12]}); "
            "prepare again with --force"
        )
    file, index_file = path.with_name(f"{name}.tokens"), path.with_name(f"{name}.index.npy")
    if not file.is_file():
        raise DataError(f"{file} is missing; prepare again with --force")
    stat, wanted = file.stat(), info["tokens"] * np.dtype(info["dtype"]).itemsize
    if stat.st_size != wanted:
        raise DataError(f"{file} has {stat.st_size} bytes, not {wanted}; prepare again with --force")
    index_sum = info.get("index_sha256")  # an earlier version kept none
    if index_sum is not None and index_file.is_file() and sha256(index_file) != index_sum:
        raise DataError(f"{index_file} {OTHER_CONTENTS}")
    try:
        index = np.load(index_file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{index_file} cannot be read ({error}); prepare again with --force") from None
    fits = index.dtype == np.uint64 and index.shape == (info["documents"], 3)
    if not fits or index[:, IDS].sum() != info["tokens"]:
        raise DataError(f"{index_file} does not fit {path}; prepare again with --force")
    return index, TokenFile(
        str(file), info["dtype"], stat.st_ino, stat.st_mtime_ns, info.get("tokens_sha256")
    )


def build(folder: Path, unit: Unit, section: SourceSection, tokenizer: Tokenizer) -> None:
    """Tokenise one unit and write its three files.

    Raises DataError for text that cannot be read (see `sources`).
    """
    path = unit.sidecar(folder)
    dtype = token_dtype(tokenizer.vocab_size)
    skips = Skips()
    rows: list[tuple[int, int, int]] = []
    path.unlink(missing_ok=True)
    files = [file_identity(item, section) for item in unit.inputs]
    tokens_sum = hashlib.sha256()  # of what was meant to be written, whatever the disk makes of it
    with replacing(path.with_suffix(".tokens")) as file:
        for item in unit.inputs:
            for text in read_documents(item, section, skips):
                data = text.encode("utf-8")
                ids = [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]
                stored = np.asarray(ids, dtype).tobytes()
                file.write(stored)
                tokens_sum.update(stored)
                rows.append((len(ids), len(data), content_hash(data)))
    index = np.array(rows, np.uint64).reshape(-1, 3)
    packed = io.BytesIO()
    np.save(packed, index)
    with replacing(path.with_suffix(".index.npy")) as file:
        file.write(packed.getbuffer())
    info = {
        **unit_settings(section, tokenizer),
        "dtype": dtype.str,
        "documents": len(rows),
        "tokens": int(index[:, IDS].sum()),
        "bytes": int(index[:, BYTES].sum()),
        "bad": skips.bad,
        "skipped": dict(sorted(skips.counts.items())),
        "skipped_places": skips.places,
        "tokens_sha256": tokens_sum.hexdigest(),
        "index_sha256": hashlib.sha256(packed.getbuffer()).hexdigest(),
        "files": files,
    }
    write_json(path, info)


def file_identity(item: Input, section: SourceSection) -> dict[str, Any]:
    """Read what a later change of a file is found by: size, times (ns) of changes to its content and of any,
    and hashes of the whole and, where that is large, of samples."""
    try:
        stat = Path(item.path).stat()
    except OSError as error:
        raise DataError(f"{item.label}: {error.strerror}") from None
    hashes = ("sha256",) if item.size <= 3 * SAMPLED else ("sha256", "samples")
    times = {"changed": stat.st_mtime_ns, "status_changed": stat.st_ctime_ns}
    return {"label": item.label, "size": stat.st_size, **times} | {
        h: _digest(item, section, h) for h in hashes
    }


def _digest(item: Input, section: SourceSection, which: str) -> str:
    """Hash a file (SHA-256): the whole, or `samples`, SAMPLED bytes at its start, middle and end, which are
    the whole where it has no more. Empty where it cannot be opened and bad_lines is skip."""
    if section.bad_lines == "skip" and not os.access(item.path, os.R_OK):
        return ""
    try:
        if which == "sha256" or item.size <= 3 * SAMPLED:
            return sha256(Path(item.path))
        with open(item.path, "rb") as file:
            digest = hashlib.sha256()
            for start in (0, item.size // 2, item.size - SAMPLED):
                file.seek(start)
                digest.update(file.read(SAMPLED))
            return digest.hexdigest()
    except OSError as error:
        raise DataError(f"{item.label}: {error.strerror}") from None


def difference(
    folder: Path, unit: Unit, section: SourceSection, tokenizer: Tokenizer, contents: bool
) -> str | None:
    """Say why a finished unit is no longer what its sources and settings ask for; None: it is. `contents`:
    the shard's ids are read whole too, and compared with their checksum."""
    path = unit.sidecar(folder)
    try:
        info = read_sidecar(path)
        for key, value in unit_settings(section, tokenizer).items():
            if info[key] != value:
                name = "the tokenizer" if key == "tokenizer" else key
                return f"{path}: {name} was {info[key]!r}, is now {value!r}"
        _, file = open_shard(folder, unit.source, unit.name, tokenizer.fingerprint)
        if contents and (found := file.fault()) is not None:
            return found
    except DataError as error:
        return str(error)
    if info["bad"] and section.bad_lines == "error":
        return f"{path}: bad lines were skipped, now bad_lines is error"
    return other_files(path, info, unit, section)


def other_files(
    path: Path, info: dict[str, Any], unit: Unit, section: SourceSection, which: str = "sha256"
) -> str | None:
    """Say how a unit's files differ from those in its sidecar `info`, read from `path`.

    A file whose size and times are as they were is not read. Other times alone, as of a copy, are no change:
    its `sha256` tells, or its `samples` (`which`).
    """
    before = {entry["label"]: entry for entry in info["files"]}
    labels = {item.label for item in unit.inputs}
    if before.keys() != labels:
        changed = sorted(before.keys() ^ labels)
        more = " and others" if len(changed) > 1 else ""
        return f"{path}: the files of the source changed ({changed[0]}{more})"
    for item in unit.inputs:
        was, stat = before[item.label], Path(item.path).stat()
        if was["size"] != item.size:
            return f"{item.label} changed since it was prepared ({was['size']} bytes then, {item.size} now)"
        times = stat.st_mtime_ns, stat.st_ctime_ns
        if times == (was["changed"], was.get("status_changed", stat.st_ctime_ns)):
            continue
        # of a large file, an earlier version took no samples
        expected = was.get(which, was["sha256"] if item.size <= 3 * SAMPLED else None)
        if expected is not None and _digest(item, section, which) != expected:
            return f"{item.label} changed since it was prepared (of {item.size} bytes then and now)"
    return None
