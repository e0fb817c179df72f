"""Token shards: what is written for each unit of input, and how it is read.

A unit is one file, or a run of small text files. It becomes three files in `<folder>/<source>/`:
    NAME.tokens      ids, little-endian uint16 (vocabularies of up to 65536 ids) or uint32; every document is
                     begin id + tokens + end id, so that each token of text is predicted once
    NAME.index.npy   uint64 [documents, 3]: ids, UTF-8 bytes, hash of the content
    NAME.json        counts, what was left out, fingerprints; written last: a unit with this file is finished
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybrid.errors import DataError
from hybrid.files import damaged, read_json, replacing, write_json
from hybrid.recipe.schema import SourceSection

from .sources import Input, Skips, read_documents
from .tokenizer import Tokenizer

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
        return sum(item.size for item in self.inputs)


def group(source: str, inputs: list[Input]) -> list[Unit]:
    """Cut a source's files into units: runs of small text files of about 1 MiB together (a thousandth of the
    source when that is more), every other file alone. Depends on the files' order, names and sizes only."""
    target = max(1 << 20, sum(item.size for item in inputs) // 1000)
    units: list[Unit] = []
    run: list[Input] = []

    def close(items: list[Input]) -> None:
        if items:
            first = Path(items[0].label.replace(":", "/")).name
            stem = "".join(
                c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in first.split(".")[0]
            )
            units.append(Unit(source, f"{len(units):05d}-{stem[:40]}", tuple(items)))

    for item in inputs:
        alone = item.format != "text" or item.size >= target
        if run and (alone or sum(i.size for i in run) + item.size > target):
            close(run)
            run = []
        if alone:
            close([item])
        else:
            run.append(item)
    close(run)
    return units


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Two bytes an id where they suffice, else four; little-endian."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def content_hash(data: bytes) -> int:
    """64 bits that say which side of the train/validation split a document is on, wherever it stands."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def held_out(hashes: NDArray[np.uint64], share: float) -> NDArray[np.bool_]:
    """Which documents of a source are held out for validation, by their content hashes.

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


def unit_settings(section: SourceSection, tokenizer: Tokenizer) -> dict[str, Any]:
    """What a shard's bytes depend on beside its inputs."""
    return {
        "format": FORMAT,
        "tokenizer": tokenizer.fingerprint,
        "text_key": section.text_key,
    }


def sidecar(folder: Path, source: str, name: str) -> Path:
    return folder / source / f"{name}.json"


SIDECAR = {
    **{"format": int, "tokenizer": str, "text_key": str, "dtype": str, "documents": int, "tokens": int},
    **{"bytes": int, "bad": int, "skipped": dict, "skipped_places": list, "files": list},
}


def read_sidecar(path: Path) -> dict[str, Any]:
    """What `build` wrote. Raises DataError when the file is damaged or of another format."""
    form = read_json(path, {"format": int})["format"]
    if form != FORMAT:
        raise DataError(f"{path} has shard format {form}, this version reads {FORMAT}; prepare it again")
    info = read_json(path, SIDECAR)
    if info["dtype"] not in ("<u2", "<u4"):
        raise damaged(path, f"'dtype' is {info['dtype']!r}")
    return info


class TokenFile(NamedTuple):
    """Where a shard's ids are; the last two tell a file made anew from the one that was there before."""

    path: str
    dtype: str
    inode: int
    changed: int


def open_shard(folder: Path, source: str, name: str, tokenizer: str) -> tuple[NDArray[np.uint64], TokenFile]:
    """Index and token file of a finished unit. Raises DataError when its three files do not fit together, or
    `tokenizer` is not the fingerprint they were made with."""
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
    try:
        index = np.load(index_file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{index_file} cannot be read ({error}); prepare again with --force") from None
    fits = index.dtype == np.uint64 and index.shape == (info["documents"], 3)
    if not fits or index[:, IDS].sum() != info["tokens"]:
        raise DataError(f"{index_file} does not fit {path}; prepare again with --force")
    return index, TokenFile(str(file), info["dtype"], stat.st_ino, stat.st_mtime_ns)


def build(folder: Path, unit: Unit, section: SourceSection, tokenizer: Tokenizer) -> dict[str, Any]:
    """Tokenise one unit and write its three files; returns the sidecar's content.

    Raises DataError for text that cannot be read (see `sources`).
    """
    base = folder / unit.source / unit.name
    dtype = token_dtype(tokenizer.vocab_size)
    skips = Skips()
    rows: list[tuple[int, int, int]] = []
    sidecar(folder, unit.source, unit.name).unlink(missing_ok=True)
    files = [file_identity(item) for item in unit.inputs]
    with replacing(base.with_name(base.name + ".tokens")) as file:
        for item in unit.inputs:
            for text in read_documents(item, section, skips):
                data = text.encode("utf-8")
                ids = [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]
                file.write(np.asarray(ids, dtype).tobytes())
                rows.append((len(ids), len(data), content_hash(data)))
    index = np.array(rows, np.uint64).reshape(-1, 3)
    with replacing(base.with_name(base.name + ".index.npy")) as file:
        np.save(file, index)
    info = {
        **unit_settings(section, tokenizer),
        "dtype": dtype.str,
        "documents": len(rows),
        "tokens": int(index[:, IDS].sum()),
        "bytes": int(index[:, BYTES].sum()),
        "bad": skips.bad,
        "skipped": dict(sorted(skips.counts.items())),
        "skipped_places": skips.places,
        "files": files,
    }
    write_json(sidecar(folder, unit.source, unit.name), info)
    return info


def file_identity(item: Input) -> dict[str, Any]:
    """Size, time of change (ns) and SHA-256 of a file, by which a later change is found."""
    path = Path(item.path)
    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        stat = path.stat()
    except OSError as error:
        raise DataError(f"{item.label}: {error.strerror}") from None
    return {"label": item.label, "size": stat.st_size, "changed": stat.st_mtime_ns, "sha256": digest}


def difference(folder: Path, unit: Unit, section: SourceSection, tokenizer: Tokenizer) -> str | None:
    """Why a finished unit is no longer what its sources and settings say; None: it is. A file counts as
    changed when its size differs, or both its time of change and its content do."""
    path = sidecar(folder, unit.source, unit.name)
    try:
        info = read_sidecar(path)
    except DataError as error:
        return str(error)
    settings = unit_settings(section, tokenizer)
    names = {"tokenizer": "the tokenizer"}
    for key, value in settings.items():
        if info.get(key) != value:
            return f"{path}: {names.get(key, key)} was {info.get(key)!r}, is now {value!r}"
    try:
        open_shard(folder, unit.source, unit.name, tokenizer.fingerprint)
    except DataError as error:
        return str(error)
    if info["bad"] and section.bad_lines == "error":
        return f"{path}: bad lines were skipped, now bad_lines is error"
    try:
        if (found := other_files(path, info, unit)) is not None:
            return found
        before = _files(path, info)
    except DataError as error:
        return str(error)
    for item in unit.inputs:
        _, changed, digest = before[item.label]
        if Path(item.path).stat().st_mtime_ns != changed and file_identity(item)["sha256"] != digest:
            return f"{item.label} changed since it was prepared"
    return None


def other_files(path: Path, info: dict[str, Any], unit: Unit) -> str | None:
    """How the names and sizes of a unit's files differ from those in its sidecar `info`, read from `path`.
    Raises DataError when it is damaged."""
    before = {label: size for label, (size, _, _) in _files(path, info).items()}
    now = {item.label: item.size for item in unit.inputs}
    if before.keys() != now.keys():
        changed = sorted(before.keys() ^ now.keys())
        more = " and others" if len(changed) > 1 else ""
        return f"{path}: the files of the source changed ({changed[0]}{more})"
    for label, size in now.items():
        if before[label] != size:
            return f"{label} changed since it was prepared ({before[label]} bytes then, {size} now)"
    return None


def _files(path: Path, info: dict[str, Any]) -> dict[str, tuple[int, int, str]]:
    """Size, time of change and digest by label."""
    try:
        return {entry["label"]: (entry["size"], entry["changed"], entry["sha256"]) for entry in info["files"]}
    except (KeyError, TypeError):
        raise damaged(path, "'files' holds something else") from None


def unit_to_json(unit: Unit) -> dict[str, Any]:
    return asdict(unit)


def unit_from_json(value: dict[str, Any]) -> Unit:
    return Unit(value["source"], value["name"], tuple(Input(**item) for item in value["inputs"]))
