"""The path that words' times say through the transducer's lattice."""

from hypothesis import given
from hypothesis import strategies as st

from models.parakeet.training.alignment import TimedPieces, align, path, piece_frames

BLANK = 9


@st.composite
def timed(draw: st.DrawFn) -> list[TimedPieces]:
    edges = sorted(draw(st.lists(st.floats(0.0, 4.0), min_size=2, max_size=12)))
    pieces = st.lists(st.integers(0, 8), min_size=1, max_size=4)
    return [TimedPieces(tuple(draw(pieces)), start, end) for start, end in zip(edges[::2], edges[1::2], strict=False)]


@given(words=timed(), n_frames=st.integers(1, 60), longest=st.integers(1, 4))
def test_the_path_says_the_pieces_in_order_and_ends_with_the_stream(
    words: list[TimedPieces], n_frames: int, longest: int
) -> None:
    _, middles = piece_frames(words, n_frames, BLANK)
    tokens = [piece for word in words for piece in word.ids]
    steps = path(tokens, middles, n_frames, BLANK, longest)
    frame = n_labels = 0
    for at, n_before, token, duration in zip(steps.frames, steps.n_before, steps.tokens, steps.durations, strict=True):
        assert (at, n_before) == (frame, n_labels) and frame < n_frames
        assert duration <= longest
        frame += duration
        if token == BLANK:
            assert duration > 0
        else:
            assert at == middles[n_labels]
            n_labels += 1
    assert frame == n_frames
    assert [token for token in steps.tokens if token != BLANK] == tokens


def test_pieces_are_said_while_their_word_is() -> None:
    said, middles = piece_frames([TimedPieces((1, 2), 0.17, 0.49), TimedPieces((3,), 0.64, 0.72)], 10, BLANK)
    assert said.tolist() == [BLANK, BLANK, 1, 1, 2, 2, BLANK, BLANK, 3, BLANK]
    assert middles.tolist() == [3, 5, 8]


def test_rows_of_a_batch_are_padded_with_steps_that_do_not_count() -> None:
    rows = [[TimedPieces((1,), 0.0, 0.08)], [TimedPieces((2, 3), 0.1, 0.4)]]
    aligned = align(rows, [2, 8], blank=BLANK, longest=4)
    assert aligned.pieces.tolist() == [[1] + [BLANK] * 7, [BLANK, 2, 2, 3, 3, BLANK, BLANK, BLANK]]
    assert aligned.counts.tolist() == [[True, False, False], [True, True, True]]
    assert aligned.tokens[1].tolist() == [BLANK, 2, 3]
    assert aligned.frames[1].tolist() == [0, 2, 4]
    assert aligned.durations[1].tolist() == [2, 2, 4]
    assert (aligned.tokens[0, 0], aligned.durations[0, 0]) == (1, 2)
