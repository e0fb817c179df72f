from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from hybrid.data.batch import Batch
from hybrid.data.preparation.prepare import prepare
from hybrid.data.store import Store
from hybrid.data.tokenizer import Tokenizer
from hybrid.data.validation import ValidationSet
from hybrid.errors import DataError
from hybrid.recipe.schema import DataSection, SourceSection

from .corpus import digits_data, stdlib_texts, write_jsonl


def held_out_data(folder: Path, texts: list[str], context: int = 32) -> DataSection:
    data = digits_data(folder, {"a": texts}, context=context, validation=1.0)
    prepare(data)
    return data


def scored(batches: list[Batch]) -> list[int]:
    labels = torch.cat([batch.labels.flatten() for batch in batches])
    return labels[labels != -100].tolist()


def test_every_id_of_the_text_and_its_end_is_a_label_once(tmp_path: Path) -> None:
    data = held_out_data(tmp_path, ["7" * 5, "7" * 100, "7" * 33])
    held_out = ValidationSet(data, sequences=2)
    batches = list(held_out)
    assert (held_out.documents, held_out.bytes, held_out.tokens) == (3, 138, 141)
    seven = Counter(scored(batches)).most_common(1)[0][0]
    assert Counter(scored(batches)) == {seven: 138, 2: 3}
    for batch in batches:
        assert batch.ids.shape == batch.labels.shape
        assert batch.ids.shape[1] <= 64
        assert batch.cu_seqlens is not None
        assert batch.cu_seqlens.diff().tolist() == [segment.length for segment in batch.segments]
        place = 0
        for segment in batch.segments:
            assert segment.offset % 32 == 0
            assert (batch.ids[0, place] == 1) == (segment.offset == 0)
            place += segment.length
    order = [(s.document, s.offset) for batch in batches for s in batch.segments]
    assert sorted(order) == [(0, 0), (1, 0), (1, 32), (1, 64), (1, 96), (2, 0), (2, 32)]
    again = [(s.document, s.offset) for batch in ValidationSet(data) for s in batch.segments]
    assert again == order


def test_bytes_and_raw_bytes_are_those_of_the_labels(tmp_path: Path, python_model: Path) -> None:
    texts = [*stdlib_texts(6), "e\u0301\U0001f600\u2581\r\n\0"]
    source = SourceSection(paths=[str(write_jsonl(tmp_path / "x.jsonl", texts))], validation=1.0)
    data = DataSection(
        folder=str(tmp_path / "out"), sources={"x": source}, tokenizer=str(python_model), context=100
    )
    prepare(data)
    tokenizer = Tokenizer.load(python_model)
    whole = ValidationSet(data)
    assert sorted(whole.texts()) == sorted(text.encode() for text in texts)
    assert whole.bytes == len(whole.raw_bytes()) == sum(len(text.encode()) for text in texts)
    assert tokenizer.decode_bytes(scored(list(whole))) == whole.raw_bytes()
    for cap in (1, 50, 1000, 5000):
        part = ValidationSet(data, cap)
        labels = scored(list(part))
        assert part.tokens == len(labels) <= cap
        assert part.bytes == len(part.raw_bytes())
        assert tokenizer.decode_bytes(labels) == part.raw_bytes()
        most = max(100, cap // 16)
        assert max(len(ids) - 1 for ids in part.arrays()) <= most
        assert all(any(text.encode().startswith(head) for text in texts) for head in part.texts())
    assert ValidationSet(data, 10**9).bytes < whole.bytes or ValidationSet(data, 10**9).tokens == whole.tokens


def test_a_cap_takes_documents_of_all_sources_in_a_fixed_order(tmp_path: Path) -> None:
    sources = {"a": [str(n) * 9 for n in range(50)], "b": [f"{n} {n}" for n in range(50)]}
    data = digits_data(tmp_path, sources, context=8, validation=1.0)
    prepare(data)
    capped = ValidationSet(data, 200)
    assert capped.tokens == 200
    kinds = {segment.source for batch in capped for segment in batch.segments}
    assert kinds == {"a", "b"}
    uncapped = [s.tolist() for s in ValidationSet(data).arrays()]
    taken = [s.tolist() for s in capped.arrays()]
    assert all(part == whole[: len(part)] for part, whole in zip(taken, uncapped, strict=False))


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_ranks_share_the_batches_in_equal_numbers(tmp_path: Path, world: int) -> None:
    data = held_out_data(tmp_path, ["1" * n for n in range(1, 60, 7)])
    alone = [batch.labels for batch in ValidationSet(data, sequences=1)]
    sets = [ValidationSet(data, sequences=1, rank=rank, world=world) for rank in range(world)]
    batches = [list(one) for one in sets]
    assert {len(one) for one in sets} == {len(one) for one in batches} == {-(-len(alone) // world)}
    in_turn = [batches[rank][turn] for turn in range(len(batches[0])) for rank in range(world)]
    for number, batch in enumerate(in_turn):
        if number < len(alone):
            assert torch.equal(batch.labels, alone[number])
        else:
            assert (batch.labels == -100).all()
            assert batch.ids.numel() > 0
    assert {one.bytes for one in sets} == {sum(range(1, 60, 7))}


def test_bits_per_byte_of_a_uniform_model(tmp_path: Path) -> None:
    """Nats / ln 2 / bytes: a uniform model pays log2(276) bits an id, for n digits and an end id."""
    held_out = ValidationSet(held_out_data(tmp_path, ["123", "4567890"]))
    nats = sum(int((batch.labels != -100).sum()) for batch in held_out) * math.log(276)
    assert nats / math.log(2) / held_out.bytes == pytest.approx(12 * math.log2(276) / 10)


def test_nothing_held_out_is_an_empty_set(tmp_path: Path) -> None:
    data = digits_data(tmp_path, {"a": ["1", "2"]})
    prepare(data)
    held_out = ValidationSet(data, world=2, rank=1)
    assert (held_out.documents, held_out.bytes, len(held_out), list(held_out)) == (0, 0, 0, [])


def test_training_and_validation_share_no_document(tmp_path: Path) -> None:
    data = digits_data(tmp_path, {"a": [str(n) for n in range(80)]}, validation=0.25)
    prepare(data)
    (source,) = Store(data).sources.values()
    validated = {s.document for batch in ValidationSet(data) for s in batch.segments}
    assert validated == set(np.flatnonzero(source.held_out).tolist())
    assert 0 < len(validated) < 80


def test_impossible_requests_are_refused(tmp_path: Path) -> None:
    data = held_out_data(tmp_path, ["1"])
    for wrong in ({"rank": 1, "world": 1}, {"sequences": 0}, {"tokens": 0}):
        with pytest.raises(DataError, match="validation needs rank < world"):
            ValidationSet(data, **wrong)
