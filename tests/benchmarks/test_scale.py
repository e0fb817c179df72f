"""`benchmarks/scale.py` at tiny sizes: every number comes out."""

import json

import pytest

from benchmarks import scale
from benchmarks.ranks import Ranks


@pytest.mark.launcher
def test_every_row_is_printed_and_kept(tmp_path, capsys):
    scale.main(["--quick", "--threads", "1", "--output", str(tmp_path)])
    found = json.loads((tmp_path / "scale-quick.json").read_text())
    assert {name: len(section["rows"]) for name, section in found.items()} == {
        "processes": 1,
        "loop": 3,
        "sequence": 2,
        "crossing": 0,
        "packed": 0,
    }
    assert set(found["processes"]["seconds"]) == {"ZeRO 1", "ZeRO 2", "ZeRO 3"}
    seconds = found["loop"]["seconds"]
    assert 0 < seconds["engine"] < seconds["step"]
    assert seconds["stall"] > 0
    crossing = found["crossing"]["measured"]["1024"]
    assert set(crossing["seconds"]) == set(crossing["bytes"]) == {"by heads", "handed on"}
    # Queries, keys, values, gates and outputs of the other rank's head (the gate with room for 8 numbers, as
    # CUDA kernels load), and a vector for the token shift.
    assert crossing["bytes"]["by heads"][0] == 2 * 4 * (1024 * (4 * 16 + 8) + 3 * 32)
    assert set(found["packed"]["tokens_per_second"]) == {"together", "one by one"}
    printed = capsys.readouterr().out
    assert "A step of 2 x 64 tokens" in printed
    assert "A step on one sequence of 1,024 tokens" in printed
    assert "A KVM layer, 2 heads of 16" in printed
    for section in found.values():
        for row in section["rows"]:
            assert row["work"] in printed
    assert "the targets do not apply" in printed


def test_a_rank_that_fails_is_told():
    with Ranks(1) as one:
        assert one.call(divmod, 7, 2) == [(3, 1)]
        with pytest.raises(RuntimeError, match=r"rank 0 of 1: (?s:.*)ZeroDivisionError"):
            one.call(divmod, 7, 0)
