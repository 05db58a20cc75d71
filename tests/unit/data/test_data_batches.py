"""Batches: the contract of a micro-batch, the order of rows, and what every rank knows about a step."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.prepared import MAX_LENGTH, PAD, prepared_data

from mcore_qwen3.arch import BatchPlan, resolve_batch
from mcore_qwen3.data.batches import StepBatch, eval_batches, largest_batch, train_batches
from mcore_qwen3.data.micro_batch import MicroBatch, build_micro_batch
from mcore_qwen3.data.order import permutation
from mcore_qwen3.data.prepare import Prepared
from mcore_qwen3.data.reader import Sample, SplitReader


def make_samples(number: int, seed: int = 0) -> list[Sample]:
    """Different lengths and different numbers of trained tokens; token values tell the sample."""
    rng = np.random.default_rng(seed)
    samples = []
    for index in range(number):
        length = int(rng.integers(2, MAX_LENGTH + 1))
        mask = np.zeros(length, np.uint8)
        mask[int(rng.integers(1, length)) :] = 1
        samples.append((np.arange(100 * index, 100 * index + length, dtype=np.int32) + 100, mask))
    return samples


def steps(prepared: Prepared, plan: BatchPlan, number: int, *, rank: int = 0, consumed: int = 0) -> list[StepBatch]:
    stream = train_batches(prepared, plan, dp_rank=rank, consumed_samples=consumed, seed=7, num_workers=0)
    return list(itertools.islice(stream, number))


def test_squared_lengths_are_those_of_all_ranks_samples(tmp_path: Path) -> None:
    samples = make_samples(23)
    prepared = prepared_data(tmp_path, samples, packing=True)
    plan = resolve_batch(1, prepared.train.rows // 2 * 2, 2)
    (first,), (second,) = (steps(prepared, plan, 1, rank=rank) for rank in (0, 1))
    assert first.global_squared_lengths == second.global_squared_lengths
    seen = [
        len(ids)
        for step in (first, second)
        for row in step.rows.flatten().tolist()
        for ids, _ in SplitReader(prepared.path, "train").samples(row)
    ]
    assert first.global_squared_lengths == sum(length**2 for length in seen)
    assert first.global_tokens == sum(seen) and len(seen) > prepared.train.rows, "some rows hold several samples"


TENSORS = ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens", "padding_mask")


def as_batch(samples: Sequence[Sequence[Sample]], row_length: int, pad: int = PAD) -> dict[str, list[int]]:
    batch = build_micro_batch(samples, row_length, pad)
    return {name: getattr(batch, name).reshape(-1).tolist() for name in TENSORS}


def test_end_token_that_is_also_the_padding_token_is_trained_by_place() -> None:  # known fault B32
    end = 7
    got = as_batch([[(np.array([5, 6, end], np.int32), np.array([0, 1, 1], np.uint8))]], 5, pad=end)
    assert got["tokens"] == [5, 6, end, end, end]
    assert got["loss_mask"] == [1, 1, 0, 0, 0]  # targets 6 and the first end token
    assert got["labels"] == [6, end, 0, 0, 0]
    assert got["padding_mask"] == [False, False, False, True, True]


def test_two_samples_of_3_and_5_in_one_row() -> None:  # known fault B33, the data half
    first = (np.array([11, 12, 13], np.int32), np.array([0, 1, 1], np.uint8))
    second = (np.array([21, 22, 23, 24, 25], np.int32), np.array([0, 0, 1, 1, 1], np.uint8))
    got = as_batch([[first, second]], 10)
    assert got == {
        "tokens": [11, 12, 13, 21, 22, 23, 24, 25, PAD, PAD],
        "labels": [12, 13, 0, 0, 23, 24, 25, 0, 0, 0],  # the last token of sample 1 has no label
        "loss_mask": [1, 1, 0, 0, 1, 1, 1, 0, 0, 0],
        "position_ids": [0, 1, 2, 0, 1, 2, 3, 4, 0, 1],
        "cu_seqlens": [0, 3, 8, 10],
        "padding_mask": [False] * 8 + [True] * 2,
    }


def test_rows_end_to_end_full_rows_and_empty_rows() -> None:
    full = (np.arange(4, dtype=np.int32), np.array([1, 1, 1, 1], np.uint8))
    short = (np.arange(3, dtype=np.int32), np.array([0, 1, 0], np.uint8))
    got = as_batch([[full], [short], []], 4)
    assert got["cu_seqlens"] == [0, 4, 7, 8, 12]  # a full row has no padding segment
    assert got["position_ids"] == [0, 1, 2, 3, 0, 1, 2, 0, 0, 1, 2, 3]
    # A mark on a first token never shows: nothing before it in its sample predicts it.
    assert got["loss_mask"] == [1, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    with pytest.raises(ValueError, match="more than 4 tokens"):
        build_micro_batch([[full, short]], 4, PAD)


def test_each_sample_is_padded_inside_its_own_segment() -> None:
    first = (np.array([11, 12, 13], np.int32), np.array([0, 1, 1], np.uint8))
    second = (np.array([21, 22, 23, 24, 25], np.int32), np.array([0, 0, 1, 1, 1], np.uint8))
    batch = build_micro_batch([[first, second]], 16, PAD, sample_multiple=4)
    assert {name: getattr(batch, name).reshape(-1).tolist() for name in TENSORS} == {
        "tokens": [11, 12, 13, PAD, 21, 22, 23, 24, 25, PAD, PAD, PAD, PAD, PAD, PAD, PAD],
        "labels": [12, 13, 0, 0, 0, 23, 24, 25, 0, 0, 0, 0, 0, 0, 0, 0],
        "loss_mask": [1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0],
        "position_ids": [0, 1, 2, 3, *range(8), 0, 1, 2, 3],
        "cu_seqlens": [0, 4, 12, 16],
        "padding_mask": [False] * 3 + [True] + [False] * 5 + [True] * 7,
    }
    with pytest.raises(ValueError, match="more than 8 tokens"):  # 8 real tokens, 12 with their padding
        build_micro_batch([[first, second]], 8, PAD, sample_multiple=4)
    with pytest.raises(ValueError, match="not a multiple of 4"):
        build_micro_batch([[first]], 6, PAD, sample_multiple=4)


def check_micro_batch(batch: MicroBatch, rows: int, row_length: int) -> None:
    total = rows * row_length
    kinds = {"tokens": torch.int64, "labels": torch.int64, "loss_mask": torch.float32, "position_ids": torch.int64}
    for name, kind in {**kinds, "padding_mask": torch.bool}.items():
        tensor = getattr(batch, name)
        assert (tensor.shape, tensor.dtype) == ((1, total), kind), name
    borders = batch.cu_seqlens.tolist()
    assert batch.cu_seqlens.dtype == torch.int32
    assert borders[0] == 0 and borders[-1] == total and borders == sorted(set(borders))
    assert set(range(0, total + 1, row_length)) <= set(borders)
    assert batch.max_seqlen == max(b - a for a, b in itertools.pairwise(borders))
    assert batch.position_ids[0].tolist() == [i for a, b in itertools.pairwise(borders) for i in range(b - a)]
    assert not batch.loss_mask[batch.padding_mask].any() and not batch.labels[batch.loss_mask == 0].any()


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("row_multiple", [1, 3])
def test_micro_batches_keep_the_contract(tmp_path: Path, packing: bool, row_multiple: int) -> None:
    prepared = prepared_data(tmp_path, make_samples(40), packing=packing, row_multiple=row_multiple)
    plan = resolve_batch(2, 8, 2)
    per_rank = [steps(prepared, plan, 6, rank=rank) for rank in range(2)]
    lengths = SplitReader(prepared.path, "train").tokens
    for ranks in zip(*per_rank, strict=True):
        rows = np.concatenate([step.rows for step in ranks])
        if packing:
            expected = {1: 16, 3: 18}[row_multiple]
        else:  # rounded up to 8, or to 24 = lcm(3, 8) but never over the full length
            longest = int(lengths[rows].max())
            expected = -(-longest // 8) * 8 if row_multiple == 1 else min(-(-longest // 24) * 24, 18)
        for step in ranks:
            assert step.row_length == expected and step.row_length % row_multiple == 0
            assert step.rows.shape == (2, 2)
            for batch in step.micro_batches:
                check_micro_batch(batch, 2, step.row_length)
            assert step.tokens == sum(int((~batch.padding_mask).sum()) for batch in step.micro_batches)
            assert step.trained_tokens == sum(int(batch.loss_mask.sum()) for batch in step.micro_batches)
            assert step.global_tokens == sum(other.tokens for other in ranks)
            assert step.global_trained_tokens == sum(other.trained_tokens for other in ranks)
    counts = [step.trained_tokens for rank in per_rank for step in rank]
    assert len(set(counts)) > 6  # ranks and steps do differ


@pytest.mark.parametrize("packing", [True, False])
def test_samples_and_rows_are_whole_multiples_under_context_parallel(tmp_path: Path, packing: bool) -> None:
    samples = make_samples(48)
    plain = prepared_data(tmp_path, samples, packing=packing)
    padded = prepared_data(tmp_path, samples, packing=packing, row_multiple=4, sample_multiple=6)
    assert padded.full_row_length == 24  # 16 rounded up to 12 = lcm(4, 6)
    plan = resolve_batch(1, 1, 1)
    got = steps(padded, plan, padded.train.rows)
    for step in got:
        assert step.row_length % 12 == 0
        for batch in step.micro_batches:
            check_micro_batch(batch, 1, step.row_length)
            assert not (batch.cu_seqlens % 6).any()
    assert pairs(got) == pairs(steps(plain, plan, plain.train.rows))


def test_without_packing_a_step_is_as_long_as_its_longest_row_on_any_rank(tmp_path: Path) -> None:
    short = [(np.arange(3, dtype=np.int32), np.array([0, 1, 1], np.uint8))] * 7
    long = (np.arange(11, dtype=np.int32), np.ones(11, np.uint8))
    prepared = prepared_data(tmp_path, [*short, long], packing=False)
    for rank in range(4):
        assert [step.row_length for step in steps(prepared, resolve_batch(1, 4, 4), 2, rank=rank)].count(16) == 1
        assert [step.row_length for step in steps(prepared, resolve_batch(1, 8, 4), 1, rank=rank)] == [16]


def pairs(batches: Sequence[StepBatch]) -> Counter[tuple[int, int, int]]:
    """Trained (token, label, position) of all micro-batches."""
    found: Counter[tuple[int, int, int]] = Counter()
    for step in batches:
        for batch in step.micro_batches:
            chosen = batch.loss_mask[0] == 1
            fields = (batch.tokens, batch.labels, batch.position_ids)
            found.update(zip(*(field[0][chosen].tolist() for field in fields), strict=True))
    return found


def test_packed_and_unpacked_train_the_same_pairs(tmp_path: Path) -> None:
    samples = make_samples(48)
    wanted = Counter(
        (int(ids[i]), int(ids[i + 1]), i) for ids, mask in samples for i in range(len(ids) - 1) if mask[i + 1]
    )
    for packing in (True, False):
        prepared = prepared_data(tmp_path, samples, packing=packing)
        assert prepared.train.rows % 2 == 0, "the epoch is whole steps"
        plan = resolve_batch(1, 2, 1)
        assert pairs(steps(prepared, plan, prepared.train.rows // 2)) == wanted
        assert pairs(list(eval_batches(prepared, plan, dp_rank=0, eval_iters=-1))) == wanted


def run_order(prepared: Prepared, plan: BatchPlan, number: int, consumed: int = 0) -> list[list[int]]:
    """The row numbers of each step in the order of the run's places, put together from all ranks."""
    per_rank = [steps(prepared, plan, number, rank=rank, consumed=consumed) for rank in range(plan.data)]
    return [
        np.stack([step.rows for step in ranks], axis=1).reshape(-1).tolist() for ranks in zip(*per_rank, strict=True)
    ]


def test_eight_rows_two_epochs(tmp_path: Path) -> None:  # known fault B43
    prepared = prepared_data(tmp_path, make_samples(8), packing=False)
    first, second = run_order(prepared, resolve_batch(1, 8, 1), 2)
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second and first != list(range(8))
    assert run_order(prepared, resolve_batch(1, 8, 1), 2) == [first, second]
    other = train_batches(prepared, resolve_batch(1, 8, 1), dp_rank=0, consumed_samples=0, seed=8, num_workers=0)
    assert next(iter(other)).rows.reshape(-1).tolist() != first


def test_order_does_not_depend_on_ranks_or_micro_batches(tmp_path: Path) -> None:
    prepared = prepared_data(tmp_path, make_samples(13), packing=False)  # 13: steps of 8 cross the epochs
    expected = run_order(prepared, resolve_batch(1, 8, 1), 6)
    flat = list(itertools.chain(*expected))
    assert [sorted(flat[13 * epoch : 13 * (epoch + 1)]) for epoch in range(3)] == [list(range(13))] * 3
    for micro, data in ((1, 2), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1), (1, 8)):
        assert run_order(prepared, resolve_batch(micro, 8, data), 6) == expected
    # Micro-batch m of rank d takes places m * B * D + d * B ... + B of the step.
    (step,) = steps(prepared, resolve_batch(2, 8, 2), 1, rank=1)
    assert step.rows.tolist() == [expected[0][2:4], expected[0][6:8]]


def test_a_run_continues_at_any_sample(tmp_path: Path) -> None:
    prepared = prepared_data(tmp_path, make_samples(13), packing=False)
    unbroken = list(itertools.chain(*run_order(prepared, resolve_batch(1, 4, 1), 12)))
    for consumed in (0, 1, 8, 13, 24):
        got = list(itertools.chain(*run_order(prepared, resolve_batch(1, 8, 2), 3, consumed)))
        assert got == unbroken[consumed : consumed + 24]


def test_eight_rows_in_steps_of_two_stopped_after_two(tmp_path: Path) -> None:  # known fault B54, the data half
    prepared = prepared_data(tmp_path, make_samples(8), packing=False)
    plan = resolve_batch(1, 2, 1)
    unbroken = [step.rows.ravel().tolist() for step in steps(prepared, plan, 4)]
    continued = [step.rows.ravel().tolist() for step in steps(prepared, plan, 2, consumed=4)]
    assert continued == unbroken[2:]
    assert sorted(itertools.chain(*unbroken[:2], *continued)) == list(range(8))


def test_the_permutation_stays_what_it_was() -> None:
    # Written down once: a run that is resumed under a later NumPy has to see the same order.
    assert permutation(8, 42, 0).tolist() == [0, 1, 4, 2, 6, 5, 7, 3]
    assert permutation(8, 42, 1).tolist() != permutation(8, 42, 0).tolist()
    assert permutation(8, 42, "split").tolist() != permutation(8, 42, 0).tolist()


def test_evaluation_sees_the_same_rows_each_time_and_fills_the_last_batch(tmp_path: Path) -> None:
    samples = make_samples(5)
    prepared = prepared_data(tmp_path, samples, packing=False)
    plan = resolve_batch(2, 4, 2)
    for _ in range(2):
        ranks = [list(eval_batches(prepared, plan, dp_rank=rank, eval_iters=-1)) for rank in range(2)]
        assert [[step.rows.tolist() for step in batches] for batches in ranks] == [
            [[[0, 1]], [[4, -1]]],
            [[[2, 3]], [[-1, -1]]],
        ]
    empty = ranks[1][1]
    check_micro_batch(empty.micro_batches[0], 2, empty.row_length)
    assert empty.micro_batches[0].padding_mask.all() and (empty.tokens, empty.trained_tokens) == (0, 0)
    assert empty.global_trained_tokens == int(samples[4][1].sum()) == ranks[0][1].global_trained_tokens
    assert empty.row_length == ranks[0][1].row_length
    for iterations, expected in ((0, 0), (1, 1), (2, 2), (9, 2)):
        assert len(list(eval_batches(prepared, plan, dp_rank=0, eval_iters=iterations))) == expected
    with pytest.raises(ValueError, match="no validation"):
        next(iter(eval_batches(dataclasses.replace(prepared, validation=None), plan, dp_rank=0, eval_iters=-1)))


def values(step: StepBatch) -> list[object]:
    tensors = [getattr(batch, name).tolist() for batch in step.micro_batches for name in TENSORS]
    return [*tensors, step.rows.tolist(), step.row_length, step.tokens, step.global_tokens, step.global_trained_tokens]


def test_building_ahead_gives_the_same_batches_and_leaves_the_random_state_alone(tmp_path: Path) -> None:
    prepared = prepared_data(tmp_path, make_samples(20), packing=True)
    plan = resolve_batch(1, 4, 2)
    state, before = torch.get_rng_state(), threading.active_count()
    stream = train_batches(prepared, plan, dp_rank=1, consumed_samples=3, seed=7, num_workers=3)
    got = list(itertools.islice(stream, 12))
    assert [values(step) for step in got] == [values(step) for step in steps(prepared, plan, 12, rank=1, consumed=3)]
    assert torch.equal(torch.get_rng_state(), state)
    assert threading.active_count() > before
    stream.close()
    assert threading.active_count() == before


def test_an_error_while_building_ahead_is_raised_once_and_ends_the_threads(tmp_path: Path) -> None:
    prepared = prepared_data(tmp_path, make_samples(20), packing=True)
    for file in prepared.path.glob("ids.npy"):
        file.write_bytes(b"")
    before = threading.active_count()
    stream = train_batches(prepared, resolve_batch(1, 4, 1), dp_rank=0, consumed_samples=0, seed=1, num_workers=2)
    with pytest.raises(EOFError):
        next(stream)
    assert threading.active_count() == before


def test_a_process_that_fails_with_an_open_stream_ends(tmp_path: Path, repo_root: Path) -> None:
    prepared = prepared_data(tmp_path, make_samples(20), packing=True)
    code = f"""
import sys
from pathlib import Path
from mcore_qwen3.arch import resolve_batch
from mcore_qwen3.data.batches import train_batches
from mcore_qwen3.data.prepare import load_prepared
stream = train_batches(load_prepared(Path({str(prepared.path)!r})), resolve_batch(1, 4, 1), dp_rank=0, consumed_samples=0,
                       seed=1, num_workers=4)
next(stream)
raise RuntimeError("stop")
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(repo_root)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and done.stderr.rstrip().endswith("RuntimeError: stop")


@pytest.mark.parametrize("packing", [False, True], ids=["rows", "packs"])
def test_a_batch_can_tell_where_its_rows_come_from(tmp_path: Path, packing: bool) -> None:
    prepared = prepared_data(tmp_path, make_samples(20), packing=packing)
    step = next(train_batches(prepared, resolve_batch(2, 4, 1), dp_rank=0, consumed_samples=0, seed=1, num_workers=0))
    for micro_batch, rows in zip(step.micro_batches, step.rows.tolist(), strict=True):
        # A sample's first token tells its number.
        firsts = micro_batch.tokens[0][micro_batch.cu_seqlens[:-1]]
        numbers = [int(token) // 100 - 1 for token in firsts if token != PAD]
        assert [place for row in rows for place in step.places(row)] == [f"a.jsonl:{number}" for number in numbers]


@pytest.mark.parametrize("packing", [False, True], ids=["rows", "packs"])
@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_no_step_is_larger_than_the_largest(tmp_path: Path, packing: bool, micro_batch_size: int) -> None:
    lengths = [3 + place % 5 for place in range(49)]
    lengths.insert(17, MAX_LENGTH)  # one long row among short ones
    samples = [(np.arange(length, dtype=np.int32), np.ones(length, np.uint8)) for length in lengths]
    prepared = prepared_data(tmp_path, samples, packing=packing)
    plan = resolve_batch(micro_batch_size, 6, 2)
    largest = largest_batch(prepared, plan, num_microbatches=1)
    steps = list(
        itertools.islice(train_batches(prepared, plan, dp_rank=0, consumed_samples=0, seed=1, num_workers=0), 20)
    )
    sizes = [step.micro_batches[0].tokens.numel() for step in steps]
    assert largest.micro_batches[0].tokens.numel() == max(sizes) == micro_batch_size * largest.row_length
    assert packing or min(sizes) < max(sizes)
    reader = SplitReader(prepared.path, "train")
    assert sorted(reader.tokens[largest.rows[0]]) == sorted(reader.tokens)[-micro_batch_size:]
    tokens, trained = int(reader.tokens[largest.rows].sum()), int(reader.trained_tokens[largest.rows].sum())
    assert (largest.tokens, largest.global_tokens) == (tokens, 2 * tokens)
    assert (largest.trained_tokens, largest.global_trained_tokens) == (trained, 2 * trained)
    assert len(largest_batch(prepared, plan, num_microbatches=4).micro_batches) == 4
    few = prepared_data(tmp_path, make_samples(2), packing=False)
    assert largest_batch(few, resolve_batch(3, 3, 1), num_microbatches=1).rows.tolist() in ([[0, 1, 0]], [[1, 0, 1]])
