"""Associative recall: what a sequence is made of, which sequences differ, bad options."""

import numpy as np
import pytest
import torch

from mercer import data
from mercer.data.recall import HELD_OUT, IGNORE, PASS

OPTIONS = {"pairs": (3, 5), "length": 24, "vocabulary": 40}


def test_every_query_is_a_key_and_its_label_is_the_value_of_that_key():
    found = data.recall(**OPTIONS)
    for pairs in (3, 5):
        items = found.held_out("valid", pairs)
        assert len(items) == HELD_OUT
        for n in range(0, len(items), 16):
            ids, labels = items[n]["input_ids"].tolist(), items[n]["labels"].tolist()
            assert len(ids) == len(labels) == 24
            known = dict(zip(ids[: 2 * pairs : 2], ids[1 : 2 * pairs : 2], strict=True))
            assert len(known) == pairs, "keys differ"
            assert all(key < 20 <= value for key, value in known.items())
            asked = [place for place in range(24) if labels[place] != IGNORE]
            assert sorted(ids[place - 1] for place in asked) == sorted(known), "each key once"
            assert all(labels[place] == ids[place] == known[ids[place - 1]] for place in asked)
            assert min(asked) > 2 * pairs
            rest = set(range(2 * pairs, 24)) - {place - 1 for place in asked}
            assert all(ids[place] >= 20 for place in rest), "no other keys"


def test_training_data_has_all_numbers_of_pairs_and_differs_between_seeds_and_passes():
    train = data.recall(**OPTIONS).train
    assert len(train) == PASS
    queries = train.labels.ne(IGNORE).sum(1)
    assert queries.bincount().tolist() == [0, 0, 0, PASS // 2, 0, PASS // 2]
    first = train.ids.clone()
    train.set_epoch(1)
    assert not torch.equal(train.ids, first)
    train.set_epoch(0)
    assert torch.equal(train.ids, first)
    assert torch.equal(data.recall(**OPTIONS).train.ids, first)
    assert not torch.equal(data.recall(**OPTIONS, seed=1).train.ids, first)


def test_splits_share_no_sequence_and_held_out_data_has_one_seed():
    options = {**OPTIONS, "pairs": 5}
    one, other = data.recall(**options), data.recall(**options, seed=1)
    splits = [one.train, one.held_out("valid", 5), one.held_out("test", 5), other.train]
    rows = [{tuple(row) for row in items.ids.tolist()} for items in splits]
    assert len(set.union(*rows)) == 2 * (PASS + HELD_OUT)
    assert torch.equal(other.held_out("valid", 5).ids, splits[1].ids)


def test_held_out_pairs_may_be_more_and_then_sequences_are_longer():
    found = data.recall(**OPTIONS, held_out_pairs=(3, 16))
    assert found.held_out("valid", 3).ids.shape == (HELD_OUT, 24)
    assert found.held_out("test", 16).ids.shape == (HELD_OUT, 64)
    assert found.longest == 64
    assert found.train.ids.shape == (PASS, 24)


def test_queries_come_by_a_power_law():
    def slots(power):
        found = data.recall(pairs=1, length=34, vocabulary=40, power=power)
        places = found.train.labels.ne(IGNORE).int().argmax(1)  # [PASS]
        return ((places - 3) // 2).bincount(minlength=16).numpy() / PASS

    weights = np.arange(1, 17) ** -0.9
    error = 4 * np.sqrt(0.25 / PASS)
    assert np.abs(slots(0.1) - weights / weights.sum()).max() < error
    assert np.abs(slots(1.0) - 1 / 16).max() < error


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pairs": ()}, "pairs must be different numbers of pairs, such as"),
        ({"pairs": (4, 4)}, "pairs must be different numbers of pairs"),
        ({"pairs": (0,)}, "pairs must be a whole number from 1 to 1024, got 0"),
        ({"pairs": "many"}, "pairs must be a whole number from 1 to 1024, got 'many'"),
        ({"held_out_pairs": 2.5}, "held_out_pairs must be a whole number"),
        ({"held_out_pairs": [[1]]}, "held_out_pairs must be a whole number"),
        ({"pairs": 17}, "length must be at least four times the pairs, 68 for 17 pairs, got 32"),
        ({"length": 10**9}, "length must be a whole number from 4 to 8192"),
        ({"vocabulary": 15}, "vocabulary must be even and at least twice the pairs, 16 for 8"),
        ({"held_out_pairs": 33}, "at least twice the pairs, 66 for 33 pairs, got 64"),
        ({"power": 0}, "power must be above 0 and at most 10, got 0"),
        ({"power": float("nan")}, "power must be above 0"),
        ({"power": "steep"}, "power must be above 0"),
        ({"seed": -1}, "seed must be a whole number"),
    ],
)
def test_bad_options_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        data.recall(**given)


def test_splits_have_names():
    with pytest.raises(ValueError, match="split must be valid or test, got 'train'"):
        data.recall().held_out("train", 4)
