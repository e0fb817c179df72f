"""What `format: auto` knows: the format of a file by its name, and which first bytes contradict it."""

from __future__ import annotations

from pathlib import PurePath

from .unpack import PACKED_SUFFIXES, SIGNATURES, compression_of

TEXT = set(
    """
    txt text md markdown rst org tex bib adoc html htm xhtml xml css scss less svg yaml yml toml ini cfg conf
    properties env log diff patch srt vtt po
    py pyi pyx ipynb r rmd jl m lua pl pm rb php sh bash zsh fish bat ps1 awk sed tcl vim el lisp clj
    cljs scm rkt hs lhs ml mli fs fsx elm ex exs erl hrl nim zig d v sv vhd vhdl c h cc cpp cxx hpp hh
    hxx cu cuh cl ino inl s asm ll f f77 f90 f95 f03 for pas ada adb ads cob go rs swift kt kts java
    scala groovy gradle dart cs vb js mjs cjs jsx ts tsx vue svelte sql graphql proto thrift cmake mk
    make dockerfile tf bzl nix lean agda coq sol
    """.split()  # noqa: SIM905 (a list of words, to be read)
)
"""Endings of text and source code."""
NAMED_TEXT = {"readme", "license", "licence", "copying", "makefile", "dockerfile", "authors", "changelog"}
"""Names without a suffix that are text."""

SUFFIXES = dict.fromkeys(TEXT, "text") | {
    **dict.fromkeys(("jsonl", "ndjson", "jl", "jsonlines"), "jsonl"),
    "json": "json",
    "parquet": "parquet",
    **dict.fromkeys(("arrow", "feather"), "arrow"),
    "csv": "csv",
    "tsv": "tsv",
}
"""Ending of a file's name, without that of a compression -> format."""

ABOUT_DATA = ("readme", "license", "licence", "copying", "citation", "notice", "changelog")
ABOUT_DATA_NAMES = {
    *("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"),
    *("_success", "_metadata", "_common_metadata"),
}

POINTERS = {
    b"version https://git-lfs.github.com/spec/": "a git-lfs pointer, not the file: fetch it (git lfs pull)",
    b"/annex/objects/": "a git-annex pointer, not the file: fetch it (git annex get)",
}
OTHER_CONTENT = {
    **{signature: f"packed with {name}" for name, signature in SIGNATURES.items()},
    b"PAR1\x15": "parquet",
    b"ARROW1\0\0": "arrow",
    b"PK\x03\x04": "a zip archive",
    b"%PDF-": "PDF",
    b"\xff\xfe": "UTF-16 (by its byte mark), not UTF-8",
    b"\xfe\xff": "UTF-16 (by its byte mark), not UTF-8",
}
TEXT_FORMATS = ("text", "jsonl", "json", "csv", "tsv")


def format_of(path: str) -> str | None:
    """Choose the reader of a file by the ending of its name, in any case; None: there is none."""
    name = PurePath(path).name.lower()
    name = name.removesuffix(compression_of(name) or "")
    stem, dot, suffix = name.rpartition(".")
    return SUFFIXES.get(suffix) if dot and stem else ("text" if name in NAMED_TEXT else None)


def is_about_data(path: str) -> bool:
    """Tell whether a file beside data describes them, by its name."""
    name = PurePath(path).name.lower()
    return name in ABOUT_DATA_NAMES or name.split(".")[0] in ABOUT_DATA


def contradiction(path: str, head: bytes, kind: str) -> str | None:
    """Say what a file's first bytes show it to be when they cannot be of the format `kind`."""
    for start, words in POINTERS.items():
        if head.startswith(start):
            return words
    if (suffix := compression_of(path)) is not None:
        compression = PACKED_SUFFIXES[suffix]
        if kind not in TEXT_FORMATS:
            return f"{kind} packed with {compression}, which is not read: unpack it first"
        fits = head.startswith(SIGNATURES[compression]) or (
            compression == "zstd" and head[1:4] == b"\x2aM\x18"
        )
        return None if fits or not head else f"not packed with {compression}, as its name says"
    if kind in TEXT_FORMATS:
        for start, words in OTHER_CONTENT.items():
            if head.startswith(start):
                return f"{words}, which its name does not say"
    return None
