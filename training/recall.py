"""A recall task woven into text: pairs of a key and a value are stored along the way and asked for later.

    ... text ... STORE k v ... text ... STORE k' v' ... text ... ASK k v ...

Keys, values and the two markers are tokens behind the vocabulary of the text, so that nothing but the pair says what v
is: chance is one in ``VALUES``. A key is stored once in a row. The distances between a pair and its questions are spread
over the orders of magnitude that a row has room for. Some rows have an event in every cell: they have many questions at
short distances, from which a model finds out what the task is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

KEYS, VALUES = 64, 32
EXTRA_TOKENS = 2 + KEYS + VALUES
PAIRS = 32  # of a row, less where it is short
CELL = 4  # tokens; an event takes the first three of a cell
EVENTS = 0.15  # share of cells that have one


@dataclass(frozen=True)
class Rows:
    """Rows with the task in them.

    | field     | shape                | meaning                                                             |
    |-----------|----------------------|---------------------------------------------------------------------|
    | tokens    | ``[rows, length]``   | int64                                                               |
    | weights   | ``[rows, length]``   | of each token as a target of the loss: 1 for text, 0 for events,    |
    |           |                      | but the answers of a row weigh together as much as its text         |
    | questions | ``[questions, 3]``   | row, position of the answer, tokens since the pair; in row order    |
    """

    tokens: np.ndarray
    weights: np.ndarray
    questions: np.ndarray


def weave(
    stream: np.ndarray, text_vocabulary: int, rows: int, length: int, rng: np.random.Generator, dense: float = 0.0
) -> Rows:
    """``rows`` rows of ``length`` tokens: windows of ``stream`` drawn at random, with events in place of some tokens.

    A share ``dense`` of the rows has an event in every cell.
    """
    starts = rng.integers(0, len(stream) - length, rows)
    tokens = stream[starts[:, None] + np.arange(length)].astype(np.int64)
    weights = np.ones(tokens.shape, dtype=np.float32)
    store, ask, first_key, first_value = (text_vocabulary + offset for offset in (0, 1, 2, 2 + KEYS))
    cells = length // CELL
    pairs = min(PAIRS, max(2, cells // 32))
    keys = rng.permuted(np.tile(np.arange(KEYS), (rows, 1)), axis=1)[:, :pairs]
    values = rng.integers(0, VALUES, (rows, pairs))
    stored_at = np.full((rows, pairs), -(10**9))  # cells; in the order of pairs
    stored = np.zeros(rows, dtype=np.int64)
    share = np.where(rng.random(rows) < dense, 1.0, EVENTS)
    every = np.arange(rows)
    questions = []
    for cell in range(cells):
        happens = rng.random(rows) < share
        # stores are spread over the first three quarters of a row; the first event is one
        due = rng.random(rows) < pairs / (0.75 * cells * share)
        stores = happens & (stored < pairs) & (due | (stored == 0))
        asks = happens & ~stores & (stored > 0)
        wanted = cell - np.exp(rng.uniform(0, np.log(cell + 1), rows))
        pair = np.where(stores, np.minimum(stored, pairs - 1), np.abs(stored_at - wanted[:, None]).argmin(1))
        event = np.stack(
            [np.where(stores, store, ask), first_key + keys[every, pair], first_value + values[every, pair]], 1
        )
        either, begin = stores | asks, cell * CELL
        tokens[either, begin : begin + 3] = event[either]
        weights[either, begin : begin + 3] = 0
        who = every[asks]
        distance = (cell - stored_at[who, pair[who]]) * CELL
        questions.append(np.stack([who, np.full(len(who), begin + 2), distance], 1))
        stored_at[every[stores], pair[stores]] = cell
        stored += stores
    found = np.concatenate(questions).astype(np.int64)
    found = found[np.argsort(found[:, 0], kind="stable")]
    answers = np.bincount(found[:, 0], minlength=rows)
    weights[found[:, 0], found[:, 1]] = (weights.sum(1) / np.maximum(answers, 1))[found[:, 0]]
    return Rows(tokens, weights, found)
