"""Storage formats at their edges: zero, -0, subnormals, ties, values out of range, NaN, odd sizes (fault 27)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from replayssm.state.formats import FORMATS, CastFormat, Format
from replayssm.state.formats.base import LARGEST_SCALED, SMALLEST_SCALE
from replayssm.state.formats.nvfp4 import PLACES
from replayssm.state.formats.words import BYTES, Place, pack, unpack

STATE = (1, 2, 32, 4)
CASTS = [name for name, form in FORMATS.items() if isinstance(form, CastFormat)]
SCALED = [name for name in FORMATS if name not in CASTS]

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3 = sorted({m / 8 * 2.0**-6 for m in range(8)} | {(1 + m / 8) * 2.0**e for m in range(8) for e in range(-6, 9)})[:-1]


@pytest.fixture(params=list(FORMATS))
def form(request: pytest.FixtureRequest) -> Format:
    return FORMATS[request.param]


@pytest.fixture(params=CASTS)
def cast(request: pytest.FixtureRequest) -> Format:
    return FORMATS[request.param]


def back(form: Format, state: torch.Tensor) -> torch.Tensor:
    return form.decode(form.encode(state), state.dtype)


def stored(form: Format, values: list[float], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """What `form` makes of a state that starts with `values`."""
    state = torch.zeros(STATE, dtype=dtype)
    state.view(-1)[: len(values)] = torch.tensor(values, dtype=dtype)
    return back(form, state).reshape(-1)[: len(values)]


@pytest.mark.parametrize("keys", [16, 32, 80, 96, 256])
def test_parts_are_what_encode_makes(form: Format, keys: int) -> None:
    state = torch.randn(3, 2, keys, 5)
    parts = form.encode(state)
    assert {suffix: (tuple(x.shape[1:]), x.dtype) for suffix, x in parts.items()} == form.parts((2, keys, 5))
    assert all(x.dtype == form.dtype for suffix, x in parts.items() if not suffix)
    assert form.decode(parts, torch.float32).shape == state.shape


def test_bits_per_element(form: Format) -> None:
    """As the parts of a state with long columns have it, where scales of whole columns and heads no longer count."""
    shape = (1, 2**16, 64)
    stored = sum(int(np.prod(part)) * dtype.itemsize for part, dtype in form.parts(shape).values())
    assert stored * 8 / np.prod(shape) == pytest.approx(form.bits_per_element, rel=1e-3)


def test_zero_is_exact(form: Format) -> None:
    assert not stored(form, [0.0, -0.0]).any()
    assert not stored(form, [0.0, -0.0, 1.0])[:2].any()
    if form.name != "int8":
        assert stored(form, [0.0, -0.0]).signbit().tolist() == [False, True]


def test_casts_round_to_nearest_even(cast: Format) -> None:
    eps = torch.finfo(cast.dtype).eps
    ties = [1 + eps / 2, 1 + 3 * eps / 2, -1 - eps / 2]
    if cast.name != "fp64":
        assert stored(cast, ties).tolist() == [1.0, 1 + 2 * eps, -1.0]
    assert stored(cast, [1 + eps]).item() == 1 + eps


def test_subnormals_of_casts_survive(cast: Format) -> None:
    smallest = torch.finfo(cast.dtype).smallest_normal * torch.finfo(cast.dtype).eps
    assert stored(cast, [smallest, smallest / 4]).tolist() == [smallest, 0.0 if cast.name != "fp64" else smallest / 4]


@pytest.mark.parametrize("name", SCALED)
def test_subnormals_become_zero_or_are_close(name: str) -> None:
    """Scales stop at 2^-100: what is below a code of that is zero, never NaN."""
    form = FORMATS[name]
    tiny = [2.0**-149, -(2.0**-140), 2.0**-126, 2.0**-115]
    assert stored(form, tiny).abs().max() <= 2.0**-109
    assert (stored(form, tiny).double() - torch.tensor(tiny)).abs().max() <= SMALLEST_SCALE


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32", *SCALED])
def test_huge_values_saturate_and_are_counted(name: str) -> None:
    form = FORMATS[name]
    state = torch.full(STATE, 0.5, dtype=torch.float64)
    state[0, 0, 0, 0], state[0, 1, 2, 3], state[0, 1, 3, 3] = 2 * form.limit, -3 * form.limit, -torch.inf
    found = back(form, state)
    assert found[0, 0, 0, 0] == form.limit
    assert found[0, 1, 2, 3] == found[0, 1, 3, 3] == -form.limit
    assert form.saturated(state).tolist() == [3]
    assert found.isfinite().all()
    assert form.saturated(found).tolist() == [0]
    if name in CASTS:
        for place in ((0, 0, 0, 0), (0, 1, 2, 3), (0, 1, 3, 3)):
            found[place] = 0.5
        assert torch.equal(found, torch.full(STATE, 0.5, dtype=torch.float64))


@pytest.mark.parametrize("name", SCALED)
def test_one_huge_value_costs_only_what_shares_its_scale(name: str) -> None:
    state = torch.full((1, 2, 64, 4), 0.5)
    state[0, 1, 3, 2] = 2.0**20
    found = back(FORMATS[name], state)
    inside = torch.zeros(64, 4, dtype=torch.bool)
    inside[:, 2] = True
    for head, x in enumerate(found[0]):
        assert x.isfinite().all()
        apart = (x if head == 0 else x[~inside]).flatten().tolist()
        assert apart == [pytest.approx(0.5, rel=1e-6 if name != "nvfp4" else 2.0**-4)] * len(apart)
    assert float(found[0, 1, 3, 2]) == pytest.approx(2.0**20, rel=1e-6)


def test_nan_is_not_hidden(form: Format) -> None:
    state = torch.ones(STATE)
    state[0, 1, 3, 2] = torch.nan
    found = back(form, state).isnan()
    assert found[0, 1, 3, 2]
    assert not found[0, 0].any()
    if form.name in SCALED:
        assert found[0, 1, :, 2].all()
    assert int(found.sum()) == (STATE[2] if form.name in SCALED else 1)


def test_encoding_what_was_decoded_changes_at_most_the_last_bit_of_a_scale(form: Format) -> None:
    state = torch.randn(2, 3, 80, 8) * torch.rand(2, 3, 80, 8) ** 6
    once = back(form, state)
    assert (back(form, once) - once).abs().max() <= 2.0**-21 * once.abs().max()


def nearest(value: np.float32, grid: list[float] | tuple[float, ...]) -> int:
    """Index of the number of the grid next to `value`, the even one of two."""
    distance = [abs(float(value) - g) for g in grid]
    best = min(distance)
    found = [i for i, d in enumerate(distance) if d == best]
    return next(i for i in found if i % 2 == 0) if len(found) > 1 else found[0]


def drawn(seed: int, keys: int = 48) -> np.ndarray:
    """[2, keys, 3] of many magnitudes, some on grids, so that there are ties; a block and a column of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2, keys, 3)) * 10.0 ** rng.uniform(-6, 2, (2, keys, 1))
    x[1] = rng.integers(-48, 49, x[1].shape) / 8
    x[0, :16, 1] = 0
    x[0, :, 2] = 0
    x[1, 0] = 6 * 448 / 64
    return x.astype(np.float32)


@pytest.mark.parametrize("seed", range(3))
def test_nvfp4_is_the_published_formula(seed: int) -> None:
    """Number by number from the formulas in fp32, with the nearest code found by looking at all of them."""
    x, one = drawn(seed), np.float32(1)
    parts = FORMATS["nvfp4"].encode(torch.from_numpy(x))
    found = FORMATS["nvfp4"].decode(parts, torch.float32)
    for h in range(2):
        for block, p in itertools.product(range(3), range(3)):
            s2 = max(np.abs(x[h, :, p]).max() * np.float32(1 / 2688), np.float32(2.0**-100))
            assert parts[".column_scale"][h, p] == s2
            rows = x[h, 16 * block : 16 * block + 16, p]
            amax = np.abs(rows).max()
            wanted = min(max(amax * (one / (np.float32(6) * s2)), np.float32(2.0**-9)), np.float32(448))
            s = np.float32(1.0 if amax == 0 else E4M3[nearest(wanted, E4M3)])
            assert float(parts[".scale"][h, block, p : p + 1].view(torch.float8_e4m3fn).float()) == s
            for i, value in enumerate(rows):
                n = 16 * block + i
                index = nearest(min(abs(value) * (one / (s * s2)), np.float32(6)), E2M1)
                half = int(parts[""][h, n // 8 % 2 * 3 + block, p]) >> (16 * (n % 2))
                sign, lowest = ((15, 9), (12, 6), (14, 3), (13, 0))[n % 8 // 2]
                assert (half >> sign & 1, half >> lowest & 7) == (np.signbit(value), index)
                expected = np.float32(E2M1[index] * float(s)) * s2
                assert float(found[h, n, p]) == (-expected if np.signbit(value) else expected)


@pytest.mark.parametrize("seed", range(3))
def test_fp8_and_int8_are_their_formulas(seed: int) -> None:
    x, one = drawn(seed), np.float32(1)
    fp8, int8 = (FORMATS[name].encode(torch.from_numpy(x)) for name in ("fp8", "int8"))
    for h, p in itertools.product(range(2), range(3)):
        scale = max(np.abs(x[h, :, p]).max() * np.float32(1 / 448), np.float32(2.0**-100))
        assert fp8[".scale"][h, p] == scale
        for n in range(48):
            byte = torch.tensor([int(fp8[""][h, n // 4, p]) >> 8 * (n % 4) & 255], dtype=torch.uint8)
            code = float(byte.view(torch.float8_e4m3fn).float())
            index = nearest(min(abs(x[h, n, p]) * (one / scale), np.float32(448)), E4M3)
            assert code == np.copysign(E4M3[index], x[h, n, p])
        scale = max(np.abs(x[h, :, p]).max() * np.float32(1 / 127), np.float32(2.0**-100))
        assert int8[".scale"][h, p] == scale
        for n in range(48):
            byte = np.uint8(int(int8[""][h, n // 4, p]) >> 8 * (n % 4) & 255)
            assert int(byte.view(np.int8)) == int(np.clip(np.rint(x[h, n, p] * (one / scale)), -127, 127))


@pytest.mark.parametrize("name", [*CASTS[1:], *SCALED])
def test_error_of_one_rounding(name: str) -> None:
    """Within the bounds that the conformance tests use; see `STEP` in tests/core/oracle.py."""
    from .oracle import STEP

    generator = torch.Generator().manual_seed(0)
    for spread in (0, 2, 8):
        state = torch.randn(4, 3, 80, 8, generator=generator) * torch.rand(4, 3, 80, 8, generator=generator) ** spread
        error = (back(FORMATS[name], state).double() - state).norm(dim=(2, 3)) / state.norm(dim=(2, 3))
        assert (error <= STEP[name]).all()
        assert (error > STEP[name] / 100).all() or name == "fp32"


@pytest.mark.parametrize(("name", "keys", "block"), [("nvfp4", 24, 16), ("fp8", 6, 4), ("int8", 3, 4)])
def test_blocks_must_be_full(name: str, keys: int, block: int) -> None:
    with pytest.raises(ValueError, match=f"{name} keeps key rows in blocks of {block}, and key_dim {keys} is not"):
        FORMATS[name].parts((2, keys, 4))


@pytest.mark.parametrize(("places", "block", "keys"), [(PLACES, 16, 48), (BYTES, 4, 20), (BYTES, 20, 20)])
def test_words_hold_every_code_where_they_say(places: tuple[Place, ...], block: int, keys: int) -> None:
    codes = torch.randint(2 ** (32 // len(places)), (2, keys, 3))
    words = pack(codes, places, block)
    assert torch.equal(unpack(words, places, block), codes.int())
    in_word, blocks = len(places), keys // block
    for r, c in itertools.product(range(words.shape[1]), range(in_word)):
        key = r % blocks * block + r // blocks * in_word + c
        taken = sum(words[:, r] >> shift & mask for mask, shift in places[c])
        assert torch.equal(taken, codes[:, key].int())


@pytest.mark.parametrize("places", [PLACES, BYTES])
def test_places_fill_a_word(places: tuple[Place, ...]) -> None:
    assert sum(mask << shift for place in places for mask, shift in place) == 2**32 - 1
    assert sum((mask << shift).bit_count() for place in places for mask, shift in place) == 32


def test_limits() -> None:
    for form in FORMATS.values():
        assert form.limit == (torch.finfo(form.dtype).max if isinstance(form, CastFormat) else LARGEST_SCALED)
