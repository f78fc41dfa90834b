"""Requests become words and back, and what can't be served is refused with its range."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megakernel import isa
from megakernel.errors import RequestError
from megakernel.request import Request, decode_request, encode_request
from tests.megakernel.small import ONE_LAYER


def tokens(most: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, 99), max_size=most).map(tuple)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    head, prefix = draw(tokens(20).filter(bool)), draw(tokens(20))
    n_positions = draw(st.integers(1, 300))
    return Request(
        head=head,
        prefix=prefix,
        draft=draw(tokens(isa.REQUEST_TOKENS - len(head) - len(prefix))),
        max_tokens=draw(st.integers(1, 81 - len(head) - len(prefix))),
        n_positions=n_positions,
        rules=draw(st.integers(0, 2)),
        markers=draw(st.booleans()),
        max_first_mark=draw(st.integers(0, 19)),
        watch_row=draw(st.none() | st.integers(0, len(head) - 1)),
        watch_token=draw(st.integers(0, 99)),
        n_plain=draw(st.integers(0, n_positions)),
        tail_bias=draw(st.floats(-100, 100, width=32)),
        inverse_temperature=draw(st.floats(0, 100, width=32)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@given(requests(), st.integers(1, 2**32 - 1))
def test_a_request_is_read_as_it_was_written(request_: Request, ticket: int) -> None:
    words = encode_request(request_, ticket=ticket, sizes=ONE_LAYER, n_rules=3)
    assert words.shape == (isa.REQUEST_WORDS,)
    assert decode_request(words) == (request_, ticket)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"head": ()}, "head and prefix: 0, accepted are 1 to 80"),
        ({"head": (1,) * 81}, "head and prefix: 81"),
        ({"max_tokens": 0}, "max_tokens: 0, accepted are 1 to 79"),
        ({"max_tokens": 80}, "max_tokens: 80"),
        ({"draft": (1,) * 495}, "head, prefix and draft: 497, accepted are 1 to 496"),
        ({"n_positions": 0}, "n_positions: 0, accepted are 1 to 300"),
        ({"n_positions": 301}, "n_positions: 301"),
        ({"n_plain": 11}, "n_plain: 11, accepted are 0 to 10"),
        ({"rules": 3}, "rules: 3, accepted are 0 to 2"),
        ({"head": (100, 1)}, "a token: 100, accepted are 0 to 99"),
        ({"draft": (-1,)}, "a token: -1"),
        ({"watch_row": 2}, "watch_row: 2, accepted are 0 to 1"),
        ({"watch_token": 100}, "watch_token: 100"),
        ({"max_first_mark": 20}, "max_first_mark: 20, accepted are 0 to 19"),
        ({"seed": 2**32}, "seed: 4294967296"),
        ({"tail_bias": float("nan")}, "tail_bias nan"),
        ({"inverse_temperature": float("inf")}, "inverse_temperature inf"),
        ({"inverse_temperature": -1.0}, "inverse_temperature is -1.0: at least 0"),
    ],
)
def test_what_can_not_be_served_is_refused_with_its_range(changes: dict[str, object], says: str) -> None:
    values: dict[str, object] = {"head": (1, 2), "max_tokens": 5, "n_positions": 10, **changes}
    with pytest.raises(RequestError, match=says):
        encode_request(Request(**values), ticket=1, sizes=ONE_LAYER, n_rules=3)  # type: ignore[arg-type]  # on purpose
