"""Which files a folder or a pattern stands for: links, loops, and what cannot be read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hybrid.errors import DataError
from hybrid.recipe.schema import SourceSection

from .sources import read, source


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of two files, with a third in a folder beside it."""
    for name in ("in/a.txt", "in/b.txt", "more/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path / "in"


ALL = ["in/a.txt", "in/b.txt", "more/c.txt"]


@pytest.mark.parametrize("pattern", ["", "/**", "/**/*.txt", "/**/*"])
def test_a_linked_folder_is_read_in_folders_and_patterns_alike(folder: Path, pattern: str) -> None:
    (folder / "linked").symlink_to("../more")
    assert sorted(read(source(str(folder) + pattern))[0]) == ALL


@pytest.mark.parametrize("pattern", ["", "/**", "/**/*.txt"])
@pytest.mark.parametrize("target", [".", "..", "../in"])
def test_links_that_lead_back_end(folder: Path, pattern: str, target: str) -> None:
    (folder / "current").symlink_to(target)
    expected = ALL if target == ".." else ALL[:2]
    assert sorted(read(source(str(folder) + pattern))[0]) == expected


def test_a_file_is_read_once_whatever_names_lead_to_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    os.link(folder / "a.txt", folder / "hard.txt")
    (folder / "soft.txt").symlink_to("a.txt")
    (folder / "more1").symlink_to("../more")
    (folder / "more2").symlink_to("../more")
    spelt = ["in/a.txt", "./in/a.txt", str(folder / "a.txt"), "in/../in/a.txt"]
    assert read(SourceSection(paths=spelt))[0] == ["in/a.txt"]
    assert sorted(read(source(folder))[0]) == ALL
    assert read(SourceSection(paths=[*spelt, "in/**/*.txt", "in", "more"]))[0][0] == "in/a.txt"
    assert sorted(read(SourceSection(paths=[*spelt, "in/**/*.txt", "in", "more"]))[0]) == ALL


@pytest.mark.parametrize("pattern", ["", "/*", "/**", "/**/*", "/**/*.txt"])
@pytest.mark.parametrize("name", ["lost.txt", "chapter"])
def test_a_link_to_what_is_not_here_is_an_error_or_counted(folder: Path, pattern: str, name: str) -> None:
    """Links of git-annex and DVC whose content was never fetched."""
    if name == "chapter" and pattern == "/**/*.txt":
        (folder / name).symlink_to("../gone")
    else:
        (folder / name).symlink_to(".git/annex/objects/not-here")
    section = source(str(folder) + pattern)
    with pytest.raises(DataError, match=rf"{name}: a link to what is not here"):
        read(section)
    section.bad_lines = "skip"
    texts, skips = read(section)
    assert (texts, skips.bad) == (ALL[:2], 1)
    assert f"{folder}/{name}: a link to what is not here" in skips.places[0]


def test_a_link_to_itself_a_pipe_and_a_lost_file_named_itself(folder: Path) -> None:
    (folder / "loop.txt").symlink_to("loop.txt")
    os.mkfifo(folder / "pipe.txt")
    texts, skips = read(source(folder, bad_lines="skip"))
    assert (texts, skips.bad) == (ALL[:2], 2)
    assert set(skips.counts) == {
        "a link that leads to itself",
        "a pipe, socket or device, not a file",
    }
    (folder / "lost.txt").symlink_to("gone")
    with pytest.raises(DataError, match=r"lost\.txt: a link to what is not here"):
        read(source(folder / "lost.txt"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_an_error_or_counted(folder: Path) -> None:
    (folder / "closed").mkdir()
    (folder / "a.txt").chmod(0)
    (folder / "closed").chmod(0)
    try:
        with pytest.raises(DataError, match=r"closed: cannot be listed \(Permission denied\)"):
            read(source(folder))
        texts, skips = read(source(folder, bad_lines="skip"))
        assert (texts, skips.bad) == (["in/b.txt"], 2)
    finally:
        (folder / "closed").chmod(0o755)


def test_names_that_are_no_utf8(folder: Path) -> None:
    path = os.path.join(os.fsencode(folder), b"caf\xe9.txt")
    try:
        Path(os.fsdecode(path)).write_bytes(b"\xff")
    except OSError:
        pytest.skip("this file system has names in UTF-8 only")
    with pytest.raises(DataError, match=r"caf\\xe9\.txt, byte 0: invalid UTF-8"):
        read(source(folder))
    Path(os.fsdecode(path)).write_bytes(b"fine")
    assert "fine" in read(source(folder))[0]


def test_names_with_signs_of_patterns_and_hidden_files(folder: Path) -> None:
    (folder / "x[1].txt").write_text("signs")
    (folder / ".git").mkdir()
    (folder / ".git" / "config.txt").write_text("hidden")
    assert read(source(folder / "x[1].txt"))[0] == ["signs"]
    for pattern in ("", "/**", "/**/*.txt"):
        assert sorted(read(source(str(folder) + pattern))[0]) == [*ALL[:2], "signs"]
