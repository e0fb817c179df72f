"""What `format: auto` knows by a file's name, and content that contradicts it."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from hybrid.data.preparation.formats import format_of
from hybrid.errors import DataError
from hybrid.recipe.schema import SourceSection

from .sources import read, source

OBJECTS = [{"text": f"document {number}", "meta": {"text": f"inner {number}"}} for number in range(1, 4)]
TEXTS = ["document 1", "document 2", "document 3"]
LINES = "".join(json.dumps(value) + "\n" for value in OBJECTS)
PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
    ".zstd": zstandard.ZstdCompressor().compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize(
    "name", ["c4-train.00000-of-01024.json", "x.jsonl", "x.ndjson", "x.JL", "x.jsonlines"]
)
def test_json_lines_under_every_name_and_compression(tmp_path: Path, name: str, packed: str) -> None:
    """The names of C4 and Dolma (`.json.gz`) hold an object a line."""
    assert read(source(tmp_path / (name + packed.upper()), PACK[packed](LINES.encode())))[0] == TEXTS


@pytest.mark.parametrize("name", ["x.json", "x.json.gz"])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_list_and_objects_over_several_lines(tmp_path: Path, name: str, indent: int | None) -> None:
    pack = PACK[".gz" if name.endswith("gz") else ""]
    whole = json.dumps(OBJECTS, indent=indent)
    assert read(source(tmp_path / name, pack(whole.encode())))[0] == TEXTS
    in_a_row = "\n".join(json.dumps(value, indent=indent) for value in OBJECTS)
    assert read(source(tmp_path / name, pack(in_a_row.encode())))[0] == TEXTS
    cut = source(tmp_path / name, pack(whole[:-2].encode()))
    with pytest.raises(DataError, match=r"x\.json.*, line \d+: (no JSON|a list that does not end)"):
        read(cut)


def table_of(path: Path, columns: dict[str, list[str]]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table(columns)
    if path.suffix == ".parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    elif path.suffix == ".feather":
        with pyarrow.ipc.new_file(str(path), table.schema) as file:
            file.write_table(table)
    else:  # as Hugging Face's data sets on disk
        with pyarrow.ipc.new_stream(str(path), table.schema) as file:
            file.write_table(table)


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow", "x.feather"])
def test_tables_of_arrow(tmp_path: Path, name: str) -> None:
    table_of(tmp_path / name, {"text": TEXTS, "url": ["x"] * 3})
    assert read(source(tmp_path / name))[0] == TEXTS
    with pytest.raises(DataError, match=r"no column 'body' \(text_key\); it has: text, url"):
        read(source(tmp_path / name, text_key="body"))


@pytest.mark.parametrize(("name", "mark"), [("x.csv", ","), ("x.TSV", "\t"), ("x.csv.gz", ",")])
def test_csv_and_tsv(tmp_path: Path, name: str, mark: str) -> None:
    rows = ["\ufeffid", '1|"a ""b""\r\nc"', "2|", "3|plain"]
    content = "\r\n".join([rows[0] + "|text", *rows[1:]]).replace("|", mark) + "\r\n"
    pack = PACK[".gz" if name.endswith("gz") else ""]
    texts, skips = read(source(tmp_path / name, pack(content.encode())))
    assert texts == ['a "b"\r\nc', "plain"]
    assert dict(skips.counts) == {"empty document": 1}


def test_an_open_quote_costs_one_line(tmp_path: Path) -> None:
    content = 'id,text\n1,one\n2,"two\n3,three\n4,four\n5,f,5\n'
    section = source(tmp_path / "x.csv", content)
    with pytest.raises(DataError, match=r"x\.csv, line 3: no row"):
        read(section)
    section.bad_lines = "skip"
    texts, skips = read(section)
    assert texts == ["one", "three", "four"]
    assert skips.bad == 2
    assert "3 fields where the header has 2" in skips.counts


@pytest.mark.parametrize("name", ["x.csv", "x.parquet"])
def test_two_columns_of_the_wanted_name_are_refused(tmp_path: Path, name: str) -> None:
    if name == "x.csv":
        (tmp_path / name).write_text("text,text\na,b\n")
    else:
        pyarrow = pytest.importorskip("pyarrow")
        table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text"] * 2)
        pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / name)
    with pytest.raises(DataError, match="2 columns named 'text'"):
        read(source(tmp_path / name))


def test_a_doubled_key_is_bad(tmp_path: Path) -> None:
    section = source(tmp_path / "x.jsonl", '{"text": "a", "text": "b"}\n' + LINES)
    with pytest.raises(DataError, match=r"line 1: the key 'text' twice in an object"):
        read(section)
    section.bad_lines = "skip"
    assert read(section)[0] == TEXTS


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.parquet"])
def test_a_nested_field(tmp_path: Path, name: str) -> None:
    if name == "x.parquet":
        table_of(tmp_path / name, {"meta": [value["meta"] for value in OBJECTS]})  # type: ignore[misc]
    else:
        (tmp_path / name).write_text(LINES)
    assert read(source(tmp_path / name, text_key="meta.text"))[0] == ["inner 1", "inner 2", "inner 3"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("A.TXT", "text"), ("a.py.gz", "text"), ("README", "text"), ("a.min.js", "text")),
        *(("a.tar", None), ("a.tar.gz", None), ("a.zip", None), ("a.png", None), ("noname", None)),
        *(("a.txt.bak", None), ("a.npy", None), ("a.7z", None), ("a.gz", None), ("a.warc.gz", None)),
    ],
)
def test_names(name: str, kind: str | None) -> None:
    assert format_of(name) == kind


def test_unknown_names_are_refused_or_counted_and_the_format_key_is_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.data").write_text("two")
    with pytest.raises(DataError, match=r"format of .*b\.data is not known .* data\.sources\.s\.format"):
        read(source(tmp_path))
    texts, skips = read(source(tmp_path, bad_lines="skip"))
    assert (texts, skips.bad, dict(skips.counts)) == (["one"], 1, {"a format not known by name": 1})
    assert read(source(tmp_path, format="text"))[0] == ["one", "two"]


def tar() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        info = tarfile.TarInfo("a.txt")
        info.size = 5
        archive.addfile(info, io.BytesIO(b"hello"))
    return file.getvalue()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 90405214\n"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", POINTER, "a git-lfs pointer"),
        ("a.parquet", POINTER, "a git-lfs pointer"),
        ("a.jsonl.gz", POINTER, "a git-lfs pointer"),
        ("a.txt", b"/annex/objects/SHA256E-s3--00.txt\n", "a git-annex pointer"),
        ("a.txt", "one\ntwo".encode("utf-16-le"), "line 1: NULs, as in a binary or UTF-16 file"),
        ("a.txt", "one\ntwo".encode("utf-16"), "UTF-16"),
        ("a.jsonl", LINES.encode("utf-16"), "UTF-16"),
        ("a.txt", tar(), "line 1: NULs"),
        ("a.txt.gz", gzip.compress(tar(), mtime=0), "line 1: NULs"),
        ("a.txt", gzip.compress(b"text", mtime=0), "packed with gzip"),
        ("a.txt.gz", b"text", "not packed with gzip, as its name says"),
        ("a.txt", b"PK\x03\x04rest", "a zip archive"),
        ("a.txt", LINES.encode(), "line 1: a JSON object with the key 'text'"),
        ("a.txt.zst", PACK[".zst"](LINES.encode()), "line 1: a JSON object with the key 'text'"),
        ("a.md", json.dumps(OBJECTS).encode(), "line 1: a JSON object"),
        ("a.md", b"\n" + json.dumps(OBJECTS, indent=2).encode(), "line 3: a JSON object"),
        ("a.parquet.gz", gzip.compress(b"PAR1", mtime=0), "unpack it first"),
    ],
)
def test_content_that_contradicts_the_name(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / "good.txt").write_text("good")
    section = source(tmp_path / name, content)
    section.paths.append(str(tmp_path / "good.txt"))
    with pytest.raises(DataError) as caught:
        read(section)
    assert f"{tmp_path}/{name}" in str(caught.value)
    assert words in str(caught.value)
    section.bad_lines = "skip"
    texts, skips = read(section)
    assert (texts, skips.bad) == (["good"], 1)


def test_one_nul_and_json_without_the_key_are_text(tmp_path: Path) -> None:
    assert read(source(tmp_path / "a.c", "a\0b"))[0] == ["a\0b"]
    assert read(source(tmp_path / "a.txt", '{"name": 1}\n'))[0] == ['{"name": 1}\n']
    assert read(source(tmp_path / "b.txt", LINES, format="text"))[0] == [LINES]


def test_the_readme_of_a_hub_folder_is_no_document(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "data.jsonl").write_text(LINES)
    texts, skips = read(source(tmp_path))
    assert texts == TEXTS
    assert dict(skips.counts) == {"a file about the data beside it": 2}
    (tmp_path / "data.jsonl").rename(tmp_path / "data.txt")
    (tmp_path / "data.txt").write_text("only texts")
    (tmp_path / "dataset_info.json").unlink()
    assert read(source(tmp_path))[0] == ["about", "only texts"]


def test_a_byte_mark_is_no_text_and_line_ends_stay(tmp_path: Path) -> None:
    assert read(source(tmp_path / "a.txt", "\ufeffa\r\nb\rc\n"))[0] == ["a\r\nb\rc\n"]
    assert read(source(tmp_path / "a.jsonl", "\ufeff" + LINES.replace("\n", "\r\n")))[0] == TEXTS
    assert read(source(tmp_path / "a.json", "\ufeff" + json.dumps(OBJECTS)))[0] == TEXTS


def test_a_source_may_hold_several_formats(tmp_path: Path) -> None:
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(LINES.encode(), mtime=0))
    (tmp_path / "b.csv").write_text("text\nfrom csv\n")
    (tmp_path / "c.txt").write_text("from txt")
    section = SourceSection(paths=[str(tmp_path)])
    assert read(section)[0] == [*TEXTS, "from csv", "from txt"]
