"""A draft that went wrong goes on where the text is found again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megakernel.draft import resumed
from megakernel.isa import DRAFT_REACH

DRAFT = (1, 2, 3, 4, 5, 6, 7, 8)


@pytest.mark.parametrize(
    ("cursor", "token", "expected"),
    [
        (2, 9, 3),  # another word
        (2, 4, 4),  # one word too many in the draft
        (2, 6, 6),
        (2, 7, 3),  # too far to be it
        (4, 4, 4),  # words too few: the last guess, that one word stood for another, went too far
        (4, 2, 2),
        (4, 1, 5),
        (7, 9, 8),
    ],
)
def test_a_draft_goes_on_behind_the_same_token_nearby(cursor: int, token: int, expected: int) -> None:
    assert resumed(DRAFT, cursor, token) == expected


def test_the_nearest_place_is_taken_and_the_one_ahead_of_two() -> None:
    assert resumed((5, 1, 9, 1, 5), 2, 1) == 4
    assert resumed((1, 9, 9, 9, 1), 1, 1) == 1
    assert resumed((1, 9, 2, 9, 1), 2, 1) == 5


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.data())
def test_a_draft_goes_on_within_its_reach(draft: list[int], data: st.DataObject) -> None:
    cursor = data.draw(st.integers(0, len(draft) - 1))
    token = data.draw(st.integers(0, 5).filter(lambda token: token != draft[cursor]))
    found = resumed(draft, cursor, token)
    assert abs(found - (cursor + 1)) <= DRAFT_REACH and 0 < found <= len(draft)
    near = draft[max(cursor - DRAFT_REACH, 0) : cursor + DRAFT_REACH + 1]
    assert (draft[found - 1] == token) == (token in near)
