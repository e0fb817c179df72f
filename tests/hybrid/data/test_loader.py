from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybrid.data.batch import Batch
from hybrid.data.loader import Loader
from hybrid.data.order import ShuffledRows, apportion, shuffled
from hybrid.data.preparation.prepare import prepare
from hybrid.data.store import Store
from hybrid.errors import DataError
from hybrid.recipe.schema import DataSection

from .corpus import digits_data

LENGTHS = (5, 100, 33)
"""Tokens of the documents; with begin and end ids 142 are stored."""


def lengths_data(folder: Path, **settings: Any) -> DataSection:
    data = digits_data(folder, {"a": ["7" * length for length in LENGTHS]}, context=32, **settings)
    prepare(data)
    return data


def stream(data: DataSection, seed: int, epochs: int) -> list[int]:
    """The source's shuffled documents, epoch after epoch, joined."""
    (source,) = Store(data).sources.values()
    ids: list[int] = []
    for epoch in range(epochs):
        for document in shuffled(len(source.tokens), seed, source.name, epoch):
            ids += source.read(int(document)).tolist()
    return ids


def test_rows_cut_the_shuffled_documents_and_drop_nothing(tmp_path: Path) -> None:
    """Documents of 5, 100 and 33 tokens at length 32 (recursal/KVM-paper, data/varlen_dataset.py: packing
    dropped remainders)."""
    data = lengths_data(tmp_path, boundaries="respect")
    (source,) = Store(data).sources.values()
    assert sorted(source.tokens.tolist()) == [7, 35, 102]
    windows = ShuffledRows(source, 32, seed=3, respect=True)
    expected = stream(data, 3, epochs=20)
    assert len(expected) == 20 * 144
    rows = [windows[number] for number in range(18 * 144 // 32)]
    assert np.concatenate([row.ids for row in rows]).tolist() == expected[: 18 * 144]
    counted = Counter[int]()
    labels = np.concatenate([row.labels for row in rows])
    for place, label in enumerate(labels.tolist()):
        if expected[place] == 2:  # an end id: the next id begins another document
            assert label == -100
        else:
            assert label == expected[place + 1]
            counted[label] += 1
    # 18 epochs: every text id and end id is a label once each, begin ids never
    assert counted == {expected[1]: 18 * 138, 2: 18 * 3}


def test_random_access_is_the_same_as_reading_on(tmp_path: Path) -> None:
    data = lengths_data(tmp_path)
    (source,) = Store(data).sources.values()
    in_order = ShuffledRows(source, 32, seed=0, respect=False)
    rows = [in_order[number] for number in range(40)]
    fresh = ShuffledRows(source, 32, seed=0, respect=False)
    for number in (39, 3, 17, 0, 26):
        assert (fresh[number].ids == rows[number].ids).all()
        assert fresh[number].segments == rows[number].segments


def test_a_row_longer_than_all_documents_runs_through_several_epochs(tmp_path: Path) -> None:
    data = digits_data(tmp_path, {"a": ["1", "22"]}, context=30)
    prepare(data)
    (source,) = Store(data).sources.values()
    row = ShuffledRows(source, 30, seed=1, respect=True)[5]
    assert row.ids.tolist() == stream(data, 1, 30)[150:180]
    assert [segment.epoch for segment in row.segments][::2] == list(range(150 // 7, 180 // 7 + 1))[
        : 30 // 7 + 1
    ]
    batch = next(Loader(data, seed=1, sequences=2))
    assert batch.ids.shape == (1, 60)


def test_respected_boundaries_are_one_packed_row_with_borders_at_documents_and_rows(
    tmp_path: Path,
) -> None:
    data = lengths_data(tmp_path, boundaries="respect")
    loader = Loader(data, seed=5, sequences=3)
    batches = [next(loader) for _ in range(30)]
    for batch in batches:
        assert batch.ids.shape == batch.labels.shape == (1, 96)
        assert batch.ids.dtype == batch.labels.dtype == torch.int64
        assert batch.cu_seqlens is not None
        assert batch.cu_seqlens.dtype == torch.int32
        borders = batch.cu_seqlens.tolist()
        ids = batch.ids[0].tolist()
        starts = {place for place, token in enumerate(ids) if token == 1}
        assert set(borders) == starts | {0, 32, 64, 96}
        assert borders == sorted(set(borders))
        lengths = [segment.length for segment in batch.segments]
        assert borders == [0, *itertools.accumulate(lengths)]
        for start, segment in zip(borders, batch.segments, strict=False):
            assert (segment.offset == 0) == (ids[start] == 1)
            assert segment.fresh


def test_crossed_boundaries_are_plain_rows_and_every_label_counts(tmp_path: Path) -> None:
    data = lengths_data(tmp_path, boundaries="cross")
    loader = Loader(data, seed=5, sequences=3)
    for _ in range(20):
        batch = next(loader)
        assert batch.ids.shape == batch.labels.shape == (3, 32)
        assert batch.cu_seqlens is None
        assert (batch.labels >= 0).all()
        assert (batch.labels[:, :-1] == batch.ids[:, 1:]).all()
        # the label after an end id is the next document's begin id
        assert (batch.labels[batch.ids == 2] == 1).all()


def numbered(folder: Path, **settings: Any) -> DataSection:
    """100 documents, each its own number in 14 digits: two rows of 8 ids each, 200 in a pass."""
    texts = [f"{number:03d}".ljust(14, "7") for number in range(100)]
    data = digits_data(folder, {"a": texts}, context=8, boundaries="cross", **settings)
    prepare(data)
    return data


def seen(batches: list[Batch]) -> list[tuple[int, int]]:
    """(document, offset) of every row."""
    return [(segment.document, segment.offset) for batch in batches for segment in batch.segments]


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
def test_no_row_twice_or_missing_in_a_pass_whatever_reads_it(tmp_path: Path, workers: int) -> None:
    """pytorch/torchtitan#409, #816: saved at 2 processes after half a pass, resumed at 1, 2 and 4."""
    data = numbered(tmp_path, workers=workers)
    half = [Loader(data, seed=0, sequences=2, rank=rank, world=2) for rank in range(2)]
    first = [next(loader) for _ in range(25) for loader in half]
    assert {loader.sample for loader in half} == {100}
    every = {(document, offset) for document in range(100) for offset in (0, 8)}
    orders = set()
    for world in (1, 2, 4):
        rest = [
            Loader(data, seed=0, sequences=4 // world, rank=rank, world=world, start_sample=100)
            for rank in range(world)
        ]
        second = [next(loader) for _ in range(25) for loader in rest]
        assert {loader.sample for loader in rest} == {200}
        order = seen(first) + seen(second)
        assert sorted(order) == sorted(every)
        orders.add(tuple(order))
        for loader in rest:
            loader.close()
    assert len(orders) == 1  # the same global batches for every number of processes
    for loader in half:
        loader.close()


def test_global_batches_do_not_depend_on_processes_or_threads(tmp_path: Path) -> None:
    """pytorch/torchtitan#291, #809: any start, two sources, respected boundaries."""
    texts = {name: [str(n) * (n % 30 + 1) for n in range(40)] for name in ("a", "b")}
    data = digits_data(tmp_path, texts, context=16, weights={"a": 3.0})
    prepare(data)
    whole = Loader(data, seed=7, sequences=4)
    reference = [next(whole) for _ in range(40)]
    data.workers = 3
    for world, start in ((1, 0), (2, 4), (4, 36), (2, 100)):
        loaders = [
            Loader(data, seed=7, sequences=4 // world, rank=rank, world=world, start_sample=start)
            for rank in range(world)
        ]
        for expected in reference[start // 4 : start // 4 + 10]:
            batches = [next(loader) for loader in loaders]
            assert torch.equal(torch.cat([batch.ids for batch in batches], 1), expected.ids)
            assert torch.equal(torch.cat([batch.labels for batch in batches], 1), expected.labels)
            assert [segment for batch in batches for segment in batch.segments] == expected.segments
            assert [batch.first_sample - expected.first_sample for batch in batches] == [
                rank * 4 // world for rank in range(world)
            ]
    data.workers = 0
    odd = next(Loader(data, seed=7, sequences=4, start_sample=3))  # not a multiple of the batch
    assert odd.segments[: len(reference[0].segments)] != reference[0].segments
    assert torch.equal(odd.ids[0, :16], reference[0].ids[0, 48:])
    assert torch.equal(odd.ids[0, 16:], reference[1].ids[0, :48])


def test_seeds_and_passes_differ_and_repeat(tmp_path: Path) -> None:
    data = numbered(tmp_path)

    def order(seed: int) -> list[tuple[int, int]]:
        loader = Loader(data, seed=seed, sequences=4)
        return seen([next(loader) for _ in range(100)])

    first = order(0)
    assert first == order(0)
    assert first != order(1)
    assert first[:200] != first[200:]
    assert sorted(first[:200]) == sorted(first[200:])


def test_the_shuffle_is_fixed_and_fair() -> None:
    assert shuffled(10, 0, "a", 0).tolist() == [1, 6, 4, 7, 0, 3, 5, 9, 8, 2]
    firsts = Counter(int(shuffled(5, seed, "a", epoch)[0]) for seed in range(40) for epoch in range(25))
    assert sorted(firsts) == [0, 1, 2, 3, 4]
    assert all(150 < count < 250 for count in firsts.values())


def test_sources_are_mixed_by_weight(tmp_path: Path) -> None:
    texts = ["1" * 20] * 3
    data = digits_data(
        tmp_path, {"a": texts, "b": texts, "c": texts}, context=8, weights={"a": 2.0, "b": 1.0, "c": 0.5}
    )
    prepare(data)
    loader = Loader(data, seed=0, sequences=1)
    counts = Counter(next(loader).segments[0].source for _ in range(700))
    assert counts == {"a": 400, "b": 200, "c": 100}


def test_held_out_documents_are_never_read(tmp_path: Path) -> None:
    data = digits_data(tmp_path, {"a": [str(n) for n in range(60)]}, context=8, validation=0.4)
    prepare(data)
    (source,) = Store(data).sources.values()
    loader = Loader(data, seed=0, sequences=4)
    documents = {segment.document for _ in range(60) for segment in next(loader).segments}
    assert documents == set(np.flatnonzero(~source.held_out).tolist())


def test_a_source_held_out_whole_is_left_out_of_training(tmp_path: Path) -> None:
    data = digits_data(tmp_path, {"a": ["1", "2"], "b": ["3"]}, context=4)
    data.sources["b"].validation = 1.0
    prepare(data)
    loader = Loader(data, seed=0, sequences=4)
    assert {segment.source for _ in range(20) for segment in next(loader).segments} == {"a"}
    data.sources["a"].validation = 1.0
    with pytest.raises(DataError, match="every document is held out"):
        Loader(data, seed=0, sequences=4)


def ordered(tmp_path: Path, lanes: int, steps: int, **settings: Any) -> list[list[Any]]:
    """For each lane its segments in ordered mode."""
    data = lengths_data(tmp_path, order="document", **settings)
    loader = Loader(data, seed=2, sequences=lanes)
    rows: list[list[Any]] = [[] for _ in range(lanes)]
    for _ in range(steps):
        batch = next(loader)
        assert batch.cu_seqlens is not None
        assert len(batch.segments) == lanes
        assert batch.cu_seqlens.diff().tolist() == [segment.length for segment in batch.segments]
        for lane, segment in enumerate(batch.segments):
            rows[lane].append(segment)
    return rows


def test_ordered_mode_gives_each_document_in_successive_segments(tmp_path: Path) -> None:
    """7, 102 and 35 stored ids are 6, 101 and 34 inputs: 1, 4 and 2 segments."""
    (lane,) = ordered(tmp_path, lanes=1, steps=14)
    segments = {0: [(0, 6)], 1: [(0, 32), (32, 32), (64, 32), (96, 5)], 2: [(0, 32), (32, 2)]}
    for epoch in range(2):
        here = lane[7 * epoch : 7 * epoch + 7]
        order = list(dict.fromkeys(segment.document for segment in here))
        assert sorted(order) == [0, 1, 2]
        assert [(s.offset, s.length) for s in here] == [segment for d in order for segment in segments[d]]
        assert [s.fresh for s in here] == [s.offset == 0 for s in here]
        assert {s.epoch for s in here} == {epoch}


def test_ordered_mode_in_lanes_reads_every_segment_once(tmp_path: Path) -> None:
    lanes = ordered(tmp_path, lanes=2, steps=28)  # shares of ceil(7 / 2) = 4 segments
    counts = Counter((s.document, s.offset) for lane in lanes for s in lane)
    assert counts == {key: 8 for key in [(0, 0), (1, 0), (1, 32), (1, 64), (1, 96), (2, 0), (2, 32)]}
    for lane in lanes:
        for turn, segment in enumerate(lane):
            before = lane[turn - 1]
            follows = (
                turn > 0 and segment.document == before.document and segment.offset == before.offset + 32
            )
            assert segment.fresh == (segment.offset == 0 or turn % 4 == 0)
            assert segment.fresh or follows


def test_ordered_mode_labels_and_resuming(tmp_path: Path) -> None:
    data = lengths_data(tmp_path, order="document")
    reference = Loader(data, seed=2, sequences=4)
    batches = [next(reference) for _ in range(12)]
    (source,) = Store(data).sources.values()
    for batch in batches:
        place = 0
        for segment in batch.segments:
            ids = source.read(segment.document).tolist()
            stop = segment.offset + segment.length
            assert batch.ids[0, place : place + segment.length].tolist() == ids[segment.offset : stop]
            assert (
                batch.labels[0, place : place + segment.length].tolist() == ids[segment.offset + 1 : stop + 1]
            )
            place += segment.length
    ranks = [Loader(data, seed=2, sequences=2, rank=rank, world=2, start_sample=20) for rank in range(2)]
    for expected in batches[5:]:
        assert [segment for loader in ranks for segment in next(loader).segments] == expected.segments
    halves = Loader(data, seed=2, sequences=2, lanes=4)  # two passes of accumulation
    for expected in batches:
        assert next(halves).segments + next(halves).segments == expected.segments


def test_lanes_are_shared_by_weight() -> None:
    assert apportion([1.0, 0.25], 5) == [4, 1]
    assert apportion([1.0, 0.01], 4) == [3, 1]
    assert apportion([1.0, 1.0, 1.0], 4) in ([2, 1, 1], [1, 2, 1], [1, 1, 2])
    assert apportion([5.0], 3) == [3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"boundaries": "none"}, r"data\.boundaries is 'none'; allowed: respect, cross"),
        ({"order": "sorted"}, r"data\.order is 'sorted'; allowed: shuffle, document"),
        ({"order": "document", "boundaries": "cross"}, "needs data.boundaries respect"),
        ({"context": 0}, r"data\.context is 0"),
        ({"workers": -1}, r"data\.workers is -1"),
    ],
)
def test_impossible_settings_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    data = lengths_data(tmp_path)
    for key, value in change.items():
        setattr(data, key, value)
    with pytest.raises(DataError, match=message):
        Loader(data, seed=0, sequences=1)


def test_impossible_places_are_refused(tmp_path: Path) -> None:
    data = lengths_data(tmp_path)
    with pytest.raises(DataError, match="rank 2 of 2 processes"):
        Loader(data, seed=0, sequences=1, rank=2, world=2)
    with pytest.raises(DataError, match="start_sample is -1"):
        Loader(data, seed=0, sequences=1, start_sample=-1)
    data.sources["a"].weight = 0.0
    with pytest.raises(DataError, match=r"data\.sources\.a\.weight is 0\.0"):
        Loader(data, seed=0, sequences=1)


def test_the_loader_knows_its_vocabulary(tmp_path: Path) -> None:
    data = lengths_data(tmp_path)
    loader = Loader(data, seed=0, sequences=1)
    assert loader.vocab_size == 276
    assert loader.fingerprint == loader.store.tokenizer.fingerprint
