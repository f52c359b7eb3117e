"""A recall task woven into text: pairs of a key and a value are stored along the way and asked for later.

    ... text ... STORE k v ... text ... STORE k' v' ... text ... ASK k v ...

Keys, values and the two markers are tokens behind the vocabulary of the text, so that nothing but the pair says what v
is: chance is one in ``VALUES``. A key is stored once in a row. The distances between a pair and its questions are spread
evenly over the orders of magnitude that a row has room for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

KEYS, VALUES = 128, 64
EXTRA_TOKENS = 2 + KEYS + VALUES
PAIRS, ASKS = 32, 8  # of a row, and questions for each pair
CELL = 8  # tokens; an event takes the first three of a cell
ANSWER_WEIGHT = 10.0  # of an answer in the loss, beside 1 for a token of text


@dataclass(frozen=True)
class Rows:
    """Rows with the task in them.

    | field     | shape                | meaning                                                     |
    |-----------|----------------------|-------------------------------------------------------------|
    | tokens    | ``[rows, length]``   | int64                                                       |
    | weights   | ``[rows, length]``   | of each token as a target of the loss; 0 for keys and pairs |
    | questions | ``[questions, 3]``   | row, position of the answer, tokens since the pair          |
    """

    tokens: np.ndarray
    weights: np.ndarray
    questions: np.ndarray


def weave(stream: np.ndarray, text_vocabulary: int, rows: int, length: int, rng: np.random.Generator) -> Rows:
    """``rows`` rows of ``length`` tokens: windows of ``stream`` drawn at random, with events in place of some tokens."""
    starts = rng.integers(0, len(stream) - length, rows)
    tokens = np.stack([stream[start : start + length] for start in starts]).astype(np.int64)
    weights = np.ones(tokens.shape, dtype=np.float32)
    store, ask, first_key, first_value = (text_vocabulary + offset for offset in (0, 1, 2, 2 + KEYS))
    cells = length // CELL
    questions = []
    for row in range(rows):
        free = np.ones(cells, dtype=bool)
        keys = rng.permutation(KEYS)[:PAIRS]
        values = rng.integers(0, VALUES, PAIRS)
        for key, value in zip(keys, values, strict=True):
            at = int(rng.integers(cells - 1))
            if not free[at]:
                continue
            free[at] = False
            _put(tokens, weights, row, at, (store, first_key + key, first_value + value), 0.0)
            for lag in np.exp(rng.uniform(0, np.log(cells - at), ASKS)).astype(int):
                later = at + max(1, int(lag))
                if later >= cells or not free[later]:
                    continue
                free[later] = False
                _put(tokens, weights, row, later, (ask, first_key + key, first_value + value), ANSWER_WEIGHT)
                questions.append((row, later * CELL + 2, (later - at) * CELL))
    return Rows(tokens, weights, np.array(questions, dtype=np.int64).reshape(-1, 3))


def _put(tokens: np.ndarray, weights: np.ndarray, row: int, cell: int, event: tuple[int, ...], answer: float) -> None:
    begin = cell * CELL
    tokens[row, begin : begin + 3] = event
    weights[row, begin : begin + 3] = (0.0, 0.0, answer)
