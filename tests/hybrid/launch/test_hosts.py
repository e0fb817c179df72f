"""Hostfiles and filters: read as DeepSpeed reads them, or refused."""

import re
import socket
import time

import pytest

from hybrid.errors import LaunchError
from hybrid.launch.hosts import Host, first, read_hostfile, select
from hybrid.launch.start import require_addresses

POOL = [Host("worker-0", (0, 1, 2, 3)), Host("worker-1", (0, 1)), Host("10.0.0.7", (0,))]


def refusal(work, *args, **kwargs) -> str:
    with pytest.raises(LaunchError) as caught:
        work(*args, **kwargs)
    return str(caught.value)


def test_comments_and_blank_lines_are_accepted(tmp_path):
    """deepspeedai/DeepSpeed#3669, #2601"""
    path = tmp_path / "hosts"
    path.write_text("# two machines\n\nworker-0 slots=4\n  worker-1\tslots=2   # slow\n   \n10.0.0.7 slots=1")
    assert read_hostfile(path) == POOL


def test_deepspeed_reads_an_accepted_hostfile_alike(tmp_path):
    from deepspeed.launcher.runner import fetch_hostfile, parse_inclusion_exclusion

    path = tmp_path / "hosts"
    path.write_text("# two machines\n\nworker-0 slots=4\n  worker-1\tslots=2   # slow\n10.0.0.7 slots=1\n")
    theirs = fetch_hostfile(str(path))
    assert theirs == {host.name: len(host.slots) for host in read_hostfile(path)}
    for include, exclude in [("worker-1@worker-0:3,1", ""), ("", "worker-0:0@10.0.0.7"), ("", "worker-0")]:
        chosen = parse_inclusion_exclusion(theirs, include, exclude)
        ours = select(POOL, include, exclude)
        assert [(name, tuple(slots)) for name, slots in chosen.items()] == [(h.name, h.slots) for h in ours]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("hostB lots=8", "expected 'NAME slots=N'"),
        ("hostB", "expected 'NAME slots=N'"),
        ("hostB slots=", "expected 'NAME slots=N'"),
        ("hostB slots=-1", "expected 'NAME slots=N'"),
        ("hostB slots=2.5", "expected 'NAME slots=N'"),
        ("hostB slots=2 slots=3", "expected 'NAME slots=N'"),
        ("hostB slots=4 max_slots=8", "expected 'NAME slots=N'"),
        ("host:B slots=1", "expected 'NAME slots=N'"),
        ("slots=8", "expected 'NAME slots=N'"),
        ("hostB slots=0", "slots must be 1 or more"),
        ("hostA slots=4", "hostA stands already in line 1"),
    ],
)
def test_a_line_that_cannot_be_used_is_quoted_with_file_and_number(tmp_path, line, reason):
    """deepspeedai/DeepSpeed#3669, #2601"""
    path = tmp_path / "hosts"
    path.write_text(f"hostA slots=8\n{line}\n")
    assert refusal(read_hostfile, path).startswith(f"{path}, line 2: {line!r}: {reason}")


def test_all_wrong_lines_are_told_at_once(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("a slots=x\nb slots=1\nb slots=2\n")
    said = refusal(read_hostfile, path)
    assert "line 1: 'a slots=x'" in said
    assert "line 3: 'b slots=2': b stands already in line 2" in said


@pytest.mark.parametrize("content", ["", "# nobody\n\n"])
def test_a_hostfile_without_hosts_is_refused(tmp_path, content):
    path = tmp_path / "hosts"
    path.write_text(content)
    assert refusal(read_hostfile, path).startswith(f"{path}: names no host")


def test_a_missing_hostfile_never_means_local(tmp_path):
    assert refusal(read_hostfile, tmp_path / "hosts").startswith(
        f"there is no hostfile {tmp_path / 'hosts'}."
    )
    assert "cannot be read: Is a directory" in refusal(read_hostfile, tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in refusal(read_hostfile, tmp_path / "binary")
    (tmp_path / "marked").write_text("worker-0 slots=4\n", encoding="utf-8-sig")
    assert "marked begins with a byte mark (BOM)" in refusal(read_hostfile, tmp_path / "marked")


def test_filters_choose_hosts_and_slots_in_the_hostfiles_order():
    assert select(POOL) == POOL
    assert select(POOL, "worker-1@worker-0:3,1") == [Host("worker-0", (1, 3)), Host("worker-1", (0, 1))]
    assert select(POOL, exclude="worker-0:0,3@worker-1") == [Host("worker-0", (1, 2)), Host("10.0.0.7", (0,))]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("localhost:", "a slot's number is missing"),
        ("localhost:0,", "a slot's number is missing"),
        ("localhost:,0", "a slot's number is missing"),
        ("localhost:x", "'x' is not a slot's number"),
        ("localhost:0:1", "'0:1' is not a slot's number"),
        ("localhost:0,0", "slot 0 is named twice"),
        ("localhost:8", "localhost has no slot 8 (it has 0-7)"),
        ("localhost@localhost:1", "localhost is named twice"),
        ("localhots", "there is no host 'localhots'; did you mean localhost?"),
        ("localhost@", "'' is not a host's name"),
        (":0", "'' is not a host's name"),
        ("zebra", "there is no host 'zebra'; known: localhost"),
    ],
)
@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_malformed_filter_is_quoted(option, text, reason):
    """deepspeedai/DeepSpeed#3669, #2601"""
    said = refusal(select, [Host("localhost", tuple(range(8)))], **{option: text})
    assert said.startswith(f"--{option} {text!r}")
    assert reason in said


def test_filters_that_leave_nothing_or_contradict():
    assert "leaves no slot of worker-0, worker-1, 10.0.0.7" in refusal(
        select, POOL, exclude="worker-0@worker-1@10.0.0.7"
    )
    assert "give one of the two" in refusal(select, POOL, "worker-0", "worker-1")


def test_the_first_hosts_and_slots():
    assert first(POOL, 2, 2) == [Host("worker-0", (0, 1)), Host("worker-1", (0, 1))]
    assert first(POOL, None, None) == POOL
    assert (
        refusal(first, POOL, 4, None) == "--nodes is 4, but there are 3 hosts: worker-0, worker-1, 10.0.0.7"
    )
    assert refusal(first, POOL, None, 2) == "--gpus is 2, but 10.0.0.7 has 1 slots"


def test_names_without_address_are_told(monkeypatch):
    """deepspeedai/DeepSpeed#2612: those that are refused, and those about which no answer comes, in time."""

    def look_up(name, port):
        if name == "slow.example":
            time.sleep(5)
        if name == "gone.example":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return []

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    require_addresses(["here.example"])
    begin = time.monotonic()
    said = refusal(require_addresses, ["here.example", "gone.example", "slow.example"], 0.2)
    assert time.monotonic() - begin < 2
    assert said == (
        "no network address is known for gone.example (Name or service not known), slow.example (no answer "
        "within 0.2 s); nothing was launched"
    )


def test_a_name_of_no_machine_really_has_no_address():
    assert re.match(
        r"no network address is known for host-b\.invalid \(.+\)",
        refusal(require_addresses, ["host-b.invalid"]),
    )
    assert "a..b" in refusal(require_addresses, ["a..b"])
