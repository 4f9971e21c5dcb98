"""Logits to tokens: against a slow reference written from the definitions, and row by row."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from app import candidates, draws, sampler
from app.sampler import sample, uniform
from app.sequence import SamplingParams, Sequence
from app.shortlist import shortlist

from .sampling import distribution

Row = list[float]
EXACT = candidates._MAX_EXACT  # longer rows have their weights in float32
ROUNDING = 1e-12
untimed = settings(deadline=None, max_examples=40)
BROKEN = [
    [0.0, math.nan, 1.0],
    [math.nan, math.nan, math.nan],
    [0.0, math.inf, 1.0],
    [math.inf, -math.inf, math.nan],
    [-math.inf, -math.inf, -math.inf],
]

# Multiples of 1/4: ties are frequent, and no two weights are nearly equal.
logit = st.integers(-40, 40).map(lambda n: n / 4)
row = st.lists(logit | st.just(-math.inf), min_size=2, max_size=40).filter(
    lambda values: max(values) > -math.inf
)
temperature = st.sampled_from([0.1, 0.5, 1.0, 1.5, 2.0])
top_k = st.integers(0, 45)
top_p = st.floats(0.001, 1.0)
seed = st.integers(0, 2**64 - 1)
# A whole step of one sequence: logits of a fixed width, so that rows can share a batch.
WIDTH = 7
params = st.builds(
    SamplingParams,
    max_tokens=st.just(9),
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    top_k=st.integers(0, WIDTH),
    top_p=top_p,
    seed=seed,
)
wide_row = st.lists(
    logit | st.sampled_from([math.nan, math.inf, -math.inf]), min_size=WIDTH, max_size=WIDTH
)
step = st.tuples(wide_row, params, st.integers(0, 5))


def sequence(params: SamplingParams, num_output: int = 0) -> Sequence:
    return Sequence("id", [1], params, output_ids=[0] * num_output)


def choose(rows: list[Row], sequences: list[Sequence]) -> list[int | None]:
    """The token of each row, None if it is marked as not finite."""
    sampled = sample(np.array(rows, np.float32), sequences)
    pairs = zip(sampled.token_ids.tolist(), sampled.is_finite.tolist(), strict=True)
    return [token if is_finite else None for token, is_finite in pairs]


def choose_one(values: Row, num_output: int = 0, **fields: Any) -> int | None:
    return choose([values], [sequence(SamplingParams(9, **fields), num_output)])[0]


def fix_draw(monkeypatch: pytest.MonkeyPatch, draw: float) -> None:
    monkeypatch.setattr(sampler, "uniform", lambda seed, step: draw)


# --- greedy ---------------------------------------------------------------------------------------


@untimed
@given(row)
def test_temperature_0_takes_the_largest_logit_and_of_ties_the_lowest_id(values: Row) -> None:
    assert choose_one(values) == values.index(max(values))


@untimed
@given(row, temperature, seed)
def test_top_k_of_1_is_greedy(values: Row, temperature: float, seed: int) -> None:
    chosen = choose_one(values, temperature=temperature, top_k=1, seed=seed)
    assert chosen == values.index(max(values))


@untimed
@given(row, temperature, seed)
def test_tiny_top_p_is_greedy(values: Row, temperature: float, seed: int) -> None:
    chosen = choose_one(values, temperature=temperature, top_p=1e-9, seed=seed)
    assert chosen == values.index(max(values))


@pytest.mark.parametrize("temperature", [1e-6, 1e-100, 1e-300])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    assert choose_one([1.0, 3.0, 2.0, -math.inf], temperature=temperature, seed=5) == 1


@pytest.mark.filterwarnings("error")
def test_smallest_temperature_is_greedy_without_a_warning() -> None:
    assert choose_one([1.0, 3.0, 2.0], temperature=5e-324, seed=5) == 1


# --- rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("values", BROKEN)
def test_broken_row_is_marked(values: Row, temperature: float) -> None:
    assert choose_one(values, temperature=temperature) is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("values", BROKEN)
def test_broken_row_leaves_the_others_alone(values: Row, temperature: float) -> None:
    good = [1.0, 3.0, 2.0]
    made = sequence(SamplingParams(9, temperature=temperature, seed=3))
    (alone,) = choose([good], [made])
    assert alone is not None
    assert choose([good, values, good], [made] * 3) == [alone, None, alone]


def test_minus_infinity_beside_numbers_is_not_broken() -> None:
    assert choose_one([-math.inf, 0.0, -math.inf]) == 1


@untimed
@given(row, temperature, seed)
def test_minus_infinity_is_never_chosen(values: Row, temperature: float, seed: int) -> None:
    chosen = choose_one(values, temperature=temperature, seed=seed)
    assert chosen is not None
    assert values[chosen] > -math.inf


@settings(untimed, max_examples=80)
@given(step, st.lists(step, max_size=5), st.integers(0, 5))
def test_token_does_not_depend_on_neighbours_or_row(
    own: tuple[Row, SamplingParams, int],
    others: list[tuple[Row, SamplingParams, int]],
    place: int,
) -> None:
    place = min(place, len(others))
    batch = [*others[:place], own, *others[place:]]
    sequences = [sequence(params, num_output) for _, params, num_output in batch]
    together = choose([values for values, _, _ in batch], sequences)
    assert together[place] == choose([own[0]], [sequence(own[1], own[2])])[0]


def test_no_rows_give_no_tokens() -> None:
    sampled = sample(np.empty((0, 5), np.float32), [])
    assert (len(sampled.token_ids), len(sampled.is_finite)) == (0, 0)


def test_logits_are_not_written_to() -> None:
    logits = np.array([[1.0, 3.0, 2.0]], np.float32)
    logits.flags.writeable = False
    made = sequence(SamplingParams(9, temperature=1.0, top_k=2, top_p=0.5, seed=3))
    assert sample(logits, [made]).is_finite.all()


# --- the random number ----------------------------------------------------------------------------


@untimed
@given(seed, st.integers(0, 10**6))
@example(2**64 - 1, 0)
def test_uniform_is_fixed_by_seed_and_step_and_below_1(seed: int, step: int) -> None:
    drawn = uniform(seed, step)
    assert drawn == uniform(seed, step)
    assert 0.0 <= drawn < 1.0


@pytest.mark.parametrize("seed", [0, 8, 2**64 - 1])
def test_uniform_is_the_first_number_of_numpys_philox_at_that_step(seed: int) -> None:
    for step in [*range(40), 10**6 + 3]:
        philox = np.random.Philox(key=seed, counter=step)
        assert uniform(seed, step) == np.random.Generator(philox).random()


def test_uniform_differs_by_seed_and_by_step() -> None:
    drawn = {uniform(seed, step) for seed in range(50) for step in range(50)}
    assert len(drawn) == 2500


def test_stream_of_a_seed_can_be_repeated_and_is_not_constant() -> None:
    def stream() -> list[int | None]:
        fields: dict[str, Any] = {"temperature": 1.0, "seed": 8}
        return [choose_one([0.0] * 50, num_output, **fields) for num_output in range(20)]

    assert stream() == stream()
    assert len(set(stream())) > 10


# --- top-k and top-p ------------------------------------------------------------------------------


@settings(untimed, max_examples=120)
@given(row, temperature, top_k, top_p | st.just(1.0), seed)
def test_token_lies_within_what_top_k_and_top_p_leave(
    values: Row, temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    chosen = choose_one(values, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    assert chosen in distribution(values, temperature, top_k, top_p, 0.0, slack=ROUNDING)


@settings(untimed, max_examples=20)
@given(row, temperature, top_k, top_p | st.just(1.0))
def test_token_takes_its_share_of_the_draws(
    values: Row, temperature: float, top_k: int, top_p: float
) -> None:
    expected = distribution(values, temperature, top_k, top_p, 0.0)
    # Where the share of some tokens is p to the last bit, rounding may decide.
    assume(expected == distribution(values, temperature, top_k, top_p, 0.0, slack=ROUNDING))
    assume(expected == distribution(values, temperature, top_k, top_p, 0.0, slack=-ROUNDING))
    num_draws = 500
    counts: dict[int, int] = {}
    logits = np.array([values], np.float32)
    made = sequence(SamplingParams(9, temperature=temperature, top_k=top_k, top_p=top_p))
    with pytest.MonkeyPatch.context() as monkeypatch:
        for index in range(num_draws):
            fix_draw(monkeypatch, (index + 0.5) / num_draws)  # the draws, evenly spread
            token = int(sample(logits, [made]).token_ids[0])
            counts[token] = counts.get(token, 0) + 1
    for token in counts.keys() | expected.keys():
        share = num_draws * expected.get(token, 0.0)
        assert counts.get(token, 0) == pytest.approx(share, abs=1.001)


@pytest.mark.parametrize("draw", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.7), (3, 0.7), (0, 1e-9)])
def test_extreme_draw_still_names_a_likely_token(
    draw: float, top_k: int, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_draw(monkeypatch, draw)
    values = [-math.inf, -200.0, 0.1, 0.3, 0.2, -200.0, -math.inf]
    chosen = choose_one(values, temperature=0.1, top_k=top_k, top_p=top_p)
    assert chosen in (2, 3, 4)


@pytest.mark.parametrize("top_k", [5, 10**9])
def test_top_k_of_the_vocabulary_or_more_is_off(top_k: int) -> None:
    values = [0.1, 0.5, 0.2, 0.4, 0.3]
    for seed in range(50):
        without = choose_one(values, temperature=1.0, seed=seed)
        assert choose_one(values, temperature=1.0, top_k=top_k, seed=seed) == without


@pytest.mark.parametrize(("top_p", "last"), [(0.25, 0), (0.26, 1), (0.5, 1), (0.75, 2), (0.76, 3)])
def test_nucleus_ends_with_the_token_that_reaches_p(
    top_p: float, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_draw(monkeypatch, 1 - 2**-53)
    assert choose_one([1.0] * 4, temperature=1.0, top_p=top_p) == last


@pytest.mark.parametrize(("top_k", "last"), [(1, 0), (2, 2), (3, 3), (4, 4), (5, 4)])
def test_ties_at_the_edge_of_top_k_go_to_the_lower_ids(
    top_k: int, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_draw(monkeypatch, 1 - 2**-53)
    assert choose_one([2.0, -math.inf, 1.0, 1.0, 1.0], temperature=1.0, top_k=top_k) == last


# --- rows whose weights are float32 ---------------------------------------------------------------


def flat_and_rising(size: int) -> list[NDArray[np.float32]]:
    return [np.zeros(size, np.float32), np.linspace(0, 0.1, size, dtype=np.float32)]


@pytest.mark.parametrize("draw", [0.0, 0.3, 0.6, 1 - 2**-53])
@pytest.mark.parametrize("size", [EXACT, EXACT + 1, 3 * EXACT])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.9999, 1.0])
def test_draw_is_the_place_in_a_nucleus_of_any_size(
    top_p: float, size: int, draw: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix_draw(monkeypatch, draw)
    for logits in flat_and_rising(size):
        expected = sorted(distribution(logits.tolist(), 1.0, 0, top_p, 0.0))
        chosen = choose_one(logits.tolist(), temperature=1.0, top_p=top_p)
        # All but equally likely: the draw is the place among the ids of the nucleus.
        place = expected.index(chosen) if chosen is not None else -1
        assert place == pytest.approx(draw * len(expected), abs=0.06 * len(expected))


@pytest.mark.parametrize("size", [2000, 5000])
def test_flat_nucleus_keeps_the_lowest_ids(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fix_draw(monkeypatch, 1 - 2**-53)
    assert choose_one([0.0] * size, temperature=1.0, top_p=0.9) == 0.9 * size - 1


# --- the distribution -----------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["seed", "step"])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(0.5, 0, 1.0), (1.0, 0, 1.0), (2.0, 0, 1.0), (1.0, 4, 1.0), (1.0, 0, 0.8), (1.5, 6, 0.9)],
)
def test_tokens_come_as_often_as_softmax_says(
    temperature: float, top_k: int, top_p: float, by: str
) -> None:
    values = [0.5, 2.0, -1.0, 1.5, 0.0, 1.0, -0.5, 1.5]
    num_draws = 3000
    sequences = [
        sequence(
            SamplingParams(
                9,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=i if by == "seed" else 99,
            ),
            num_output=0 if by == "seed" else i,
        )
        for i in range(num_draws)
    ]
    tokens = sample(np.tile(np.array(values, np.float32), (num_draws, 1)), sequences).token_ids
    counts = np.bincount(tokens, minlength=len(values))
    expected = distribution(values, temperature, top_k, top_p, 0.0)
    assert set(np.flatnonzero(counts).tolist()) == expected.keys()
    chi_squared = sum(
        (counts[id_] - num_draws * share) ** 2 / (num_draws * share)
        for id_, share in expected.items()
    )
    assert chi_squared < 24.3  # 1 in 1000 for 7 degrees of freedom; the seeds are fixed


# --- many long rows at once -----------------------------------------------------------------------

LONG = st.builds(
    SamplingParams,
    max_tokens=st.just(99),
    temperature=st.sampled_from([0.1, 0.3, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 7, 50, 1000]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.sampled_from([{}, {3: 5.0, 70: -3.0}]),
    banned_token_ids=st.sampled_from([(), (1, 2, 3)]),
    seed=seed,
    num_logprobs=st.sampled_from([None, 0, 3]),
)
LONG_KINDS = ("noise", "peaked", "flat", "ties", "sparse", "broken")


def long_row(kind: str, size: int, number: int) -> NDArray[np.float32]:
    rng = np.random.default_rng(number)
    made = rng.normal(size=size).astype(np.float32)
    if kind == "peaked":
        made[rng.integers(0, size, 200)] += np.linspace(3, 12, 200, dtype=np.float32)
    elif kind == "flat":
        made[:] = 0.5
    elif kind == "ties":
        made = np.round(made)
    elif kind == "sparse":
        made[rng.random(size) < 0.999] = -np.inf
    elif kind == "broken":
        made[5] = math.nan
    return made


def long_sequence(params: SamplingParams) -> Sequence:
    return Sequence("id", [*range(60, 90)], params, output_ids=[4, 5, 70])


@settings(untimed, max_examples=30)
@given(
    st.lists(st.tuples(LONG, st.sampled_from(LONG_KINDS)), min_size=2, max_size=6),
    st.sampled_from([EXACT + 1, EXACT + 8, 9001]),
)
def test_long_row_alone_gets_what_it_gets_in_company(
    batch: list[tuple[SamplingParams, str]], size: int
) -> None:
    rows = np.array([long_row(kind, size, number) for number, (_, kind) in enumerate(batch)])
    before = rows.copy()
    together = sample(rows, [long_sequence(params) for params, _ in batch])
    assert np.array_equal(rows, before, equal_nan=True), "the model's own rows are as they were"
    for number, (params, kind) in enumerate(batch):
        alone = sample(rows[number : number + 1], [long_sequence(params)])
        assert together.is_finite[number] == alone.is_finite[0] == (kind != "broken")
        if kind != "broken":
            assert together.token_ids[number] == alone.token_ids[0]
            assert together.logprobs.get(number) == alone.logprobs.get(0)


@settings(untimed, max_examples=60)
@given(LONG, st.sampled_from(LONG_KINDS[:-1]), st.integers(0, 50), st.floats(0.001, 0.999))
def test_long_row_is_drawn_as_one_by_itself_is(
    params: SamplingParams, kind: str, number: int, draw: float
) -> None:
    values = long_row(kind, 9001, number)
    top = float(values.max())
    ids, weights = candidates.candidates(values, top, params)
    [token] = draws.draw_tokens(
        values[None], np.array([0]), values.max(keepdims=True), [params], np.array([draw])
    ).tolist()
    ids = np.arange(len(values)) if ids is None else ids
    shares = np.cumsum(weights, dtype=np.float64) / weights.sum(dtype=np.float64)
    place = int(np.searchsorted(ids, token))
    assert ids[place] == token
    # Where the draw lies at a border, the last bits of a sum in float32 decide.
    assert (shares[place - 1] if place else 0.0) - 2e-5 <= draw <= shares[place] + 2e-5


@pytest.mark.parametrize("limit", [{"top_k": 5}, {"min_p": 0.05}, {"top_p": 0.5}, {"top_p": 0.99}])
def test_most_long_rows_need_no_pass_of_their_own(
    limit: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draws, "draw_token", None)
    values = long_row("peaked", 9001, 1) * np.float32(1.5)
    assert choose([values.tolist()], [sequence(SamplingParams(9, temperature=1.0, **limit))])


@settings(untimed, max_examples=30)
@given(st.integers(EXACT, 3 * EXACT), st.sampled_from(LONG_KINDS[:-1]), st.booleans())
def test_shortlist_holds_all_that_reach_its_bound_by_rising_id(
    size: int, kind: str, has_floor: bool
) -> None:
    values = long_row(kind, size, size)
    floor = np.float32(values.max() - 1 if has_floor else -np.inf)
    found = shortlist(values[None], np.array([0]), np.array([floor]))
    num_found = int(found.counts[0])
    if num_found == 0:
        assert (values >= values.max() - 3).sum() > 500
        return
    bound = floor if has_floor else found.values[0, :num_found].min()
    expected = ((values >= bound) & (values > -np.inf)).nonzero()[0].tolist()
    assert found.ids[0, :num_found].tolist() == expected
    assert (found.values[0, num_found:] == -np.inf).all()
    assert has_floor or num_found >= min(128, int((values > -np.inf).sum()))
