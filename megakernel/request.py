"""What a slot is asked to do, and its words in the mailbox.

Knows the layout of ``isa.Request`` and the limits that a program sets. Does not know how the words reach the device
(``mailbox.py``) nor what it does with them (``select.py``).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import isa
from .errors import RequestError
from .graph import Sizes
from .numbers import float_word, word_float
from .ops import Transducer

_LARGEST_WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Request:
    """Tokens to begin with, and how to go on.

    ``head`` is fed and is not text; ``prefix`` is fed and counts as written; ``draft`` is tried, and never changes the
    outcome. The step sees ``n_positions`` of the cross cache, of which all behind the first ``n_plain`` weigh
    exp(``tail_bias``).
    """

    head: tuple[int, ...]
    max_tokens: int  # written behind the prefix, the end token not counted
    n_positions: int  # of the cross cache, at least 1
    prefix: tuple[int, ...] = ()
    draft: tuple[int, ...] = ()
    rules: int = 0  # index of the bitmaps of suppressed tokens
    markers: bool = False  # tokens obey the rules of markers
    max_first_mark: int = 0  # highest index of a marker that may come first
    watch_row: int | None = None  # position whose unmasked probability of watch_token is reported
    watch_token: int = 0
    n_plain: int | None = None  # None: all
    tail_bias: float = 0.0  # of the scores
    inverse_temperature: float = 0.0  # 0: the best token is taken, else 1 / T
    seed: int = 0


def encode_request(request: Request, *, ticket: int, sizes: Sizes, n_rules: int) -> NDArray[np.uint32]:
    """The words of ``request``: [REQUEST_WORDS], zeros behind its tokens. ``n_rules`` is the number of bitmap pairs.

    Raises:
        RequestError: if it asks for more than the program has room for, or for tokens or rules that there are not.
    """
    _check(request, sizes, n_rules)
    tokens = (*request.head, *request.prefix, *request.draft)
    words = np.zeros(isa.REQUEST_WORDS, np.uint32)
    n_plain = request.n_positions if request.n_plain is None else request.n_plain
    head = {
        isa.Request.N_HEAD: len(request.head),
        isa.Request.N_PREFIX: len(request.prefix),
        isa.Request.N_DRAFT: len(request.draft),
        isa.Request.MAX_TOKENS: request.max_tokens,
        isa.Request.RULES: request.rules,
        isa.Request.FLAGS: isa.RequestFlag.MARKERS if request.markers else 0,
        isa.Request.WATCH_ROW: isa.NO_WATCH if request.watch_row is None else request.watch_row,
        isa.Request.WATCH_TOKEN: request.watch_token,
        isa.Request.N_POSITIONS: request.n_positions,
        isa.Request.N_PLAIN: n_plain,
        isa.Request.TAIL_BIAS: float_word(request.tail_bias),
        isa.Request.INVERSE_TEMPERATURE: float_word(request.inverse_temperature),
        isa.Request.SEED: request.seed,
        isa.Request.TICKET: ticket,
        isa.Request.MAX_FIRST_MARK: request.max_first_mark,
    }
    for index, value in head.items():
        words[index] = value
    words[isa.REQUEST_HEAD_WORDS : isa.REQUEST_HEAD_WORDS + len(tokens)] = tokens
    return words


def decode_request(words: NDArray[np.uint32]) -> tuple[Request, int]:
    """The request whose words [REQUEST_WORDS] these are, and its ticket."""
    head = {word: int(words[word]) for word in isa.Request}
    n_head, n_prefix, n_draft = (head[word] for word in (isa.Request.N_HEAD, isa.Request.N_PREFIX, isa.Request.N_DRAFT))
    tokens = tuple(int(token) for token in words[isa.REQUEST_HEAD_WORDS :][: n_head + n_prefix + n_draft])
    watch_row = head[isa.Request.WATCH_ROW]
    request = Request(
        head=tokens[:n_head],
        max_tokens=head[isa.Request.MAX_TOKENS],
        n_positions=head[isa.Request.N_POSITIONS],
        prefix=tokens[n_head : n_head + n_prefix],
        draft=tokens[n_head + n_prefix :],
        rules=head[isa.Request.RULES],
        markers=bool(head[isa.Request.FLAGS] & isa.RequestFlag.MARKERS),
        max_first_mark=head[isa.Request.MAX_FIRST_MARK],
        watch_row=None if watch_row == isa.NO_WATCH else watch_row,
        watch_token=head[isa.Request.WATCH_TOKEN],
        n_plain=head[isa.Request.N_PLAIN],
        tail_bias=word_float(head[isa.Request.TAIL_BIAS]),
        inverse_temperature=word_float(head[isa.Request.INVERSE_TEMPERATURE]),
        seed=head[isa.Request.SEED],
    )
    return request, head[isa.Request.TICKET]


@dataclass(frozen=True, slots=True)
class FramePart:
    """Frames of one stream that lie in a seat, as does the state to go on from unless it ``begins`` or ``continues``.

    One that continues has the text, the state and the frames to pass over of the part before, whose own state stays in
    that part's seat as it was.
    """

    n_frames: int
    first_frame: int = 0  # those before are passed over
    begins: bool = False  # behind no text at all
    seat: int = 0
    continues: bool = False


@dataclass(frozen=True, slots=True)
class TransducerRequest:
    """Parts that a slot decodes one after the other, each in a seat of its own."""

    parts: tuple[FramePart, ...]


AnyRequest = Request | TransducerRequest


def encode(request: AnyRequest, *, ticket: int, sizes: Sizes, n_rules: int) -> NDArray[np.uint32]:
    """The words [REQUEST_WORDS] of either. Raises RequestError for what the program has no room for."""
    if isinstance(request, TransducerRequest):
        return encode_transducer_request(request, ticket=ticket, sizes=sizes)
    return encode_request(request, ticket=ticket, sizes=sizes, n_rules=n_rules)


def encode_transducer_request(request: TransducerRequest, *, ticket: int, sizes: Sizes) -> NDArray[np.uint32]:
    """The words of ``request``: [REQUEST_WORDS].

    Raises:
        RequestError: if it has no or too many parts, one has more frames than a seat holds, or goes on from what there
            is not.
    """
    if sizes.transducer is None:
        raise RequestError("the program is no transducer's: it takes tokens, not frames")
    _in_range("parts", len(request.parts), 1, isa.MAX_PARTS)
    head = [0] * isa.REQUEST_HEAD_WORDS
    head[isa.FrameRequest.N_PARTS], head[isa.FrameRequest.TICKET] = len(request.parts), ticket
    parts = [word for index, part in enumerate(request.parts) for word in _part_words(part, index, sizes.transducer)]
    words = np.zeros(isa.REQUEST_WORDS, np.uint32)
    words[: len(head) + len(parts)] = head + parts
    return words


def _part_words(part: FramePart, index: int, transducer: Transducer) -> list[int]:
    """As ``isa.FramePart`` orders them."""
    _in_range("n_frames", part.n_frames, 0, transducer.n_frames)
    _in_range("first_frame", part.first_frame, 0, part.n_frames)
    _in_range("seat", part.seat, 0, transducer.n_seats - 1)
    return [part.seat, part.n_frames, part.first_frame, _begin(part, index)]


def decode_transducer_request(words: NDArray[np.uint32]) -> tuple[TransducerRequest, int]:
    """The request whose words [REQUEST_WORDS] these are, and its ticket."""
    n_parts = int(words[isa.FrameRequest.N_PARTS])
    parts = words[isa.REQUEST_HEAD_WORDS :].reshape(-1, isa.PART_WORDS)[:n_parts].tolist()
    return TransducerRequest(tuple(map(_decode_part, parts))), int(words[isa.FrameRequest.TICKET])


def _decode_part(words: list[int]) -> FramePart:
    return FramePart(
        n_frames=words[isa.FramePart.N_FRAMES],
        first_frame=words[isa.FramePart.FIRST_FRAME],
        begins=words[isa.FramePart.BEGIN] == isa.PartBegin.NOTHING,
        seat=words[isa.FramePart.SEAT],
        continues=words[isa.FramePart.BEGIN] == isa.PartBegin.PART,
    )


def _begin(part: FramePart, index: int) -> isa.PartBegin:
    if not part.continues:
        return isa.PartBegin.NOTHING if part.begins else isa.PartBegin.STATE
    if index == 0 or part.begins or part.first_frame:
        raise RequestError(f"part {index} continues: only behind another part, with its text and from its frame on")
    return isa.PartBegin.PART


def _check(request: Request, sizes: Sizes, n_rules: int) -> None:
    n_forced = len(request.head) + len(request.prefix)
    n_tokens = n_forced + len(request.draft)
    n_marks = max(sizes.n_tokens - sizes.mark_begin, 1)
    _in_range("head and prefix", n_forced, 1, sizes.n_positions)
    _in_range("head, prefix and draft", n_tokens, 1, isa.REQUEST_TOKENS)
    _in_range("max_tokens", request.max_tokens, 1, sizes.n_positions - n_forced + 1)  # the last one is not fed
    _in_range("n_positions", request.n_positions, 1, sizes.n_cross_positions)
    _in_range("n_plain", request.n_positions if request.n_plain is None else request.n_plain, 0, request.n_positions)
    _in_range("rules", request.rules, 0, n_rules - 1)
    _in_range("max_first_mark", request.max_first_mark, 0, n_marks - 1)
    _in_range("watch_row", request.watch_row or 0, 0, n_forced - 1)
    _in_range("watch_token", request.watch_token, 0, sizes.n_tokens - 1)
    _in_range("seed", request.seed, 0, _LARGEST_WORD)
    for token in (*request.head, *request.prefix, *request.draft):
        _in_range("a token", token, 0, sizes.n_tokens - 1)
    if not (math.isfinite(request.tail_bias) and math.isfinite(request.inverse_temperature)):
        raise RequestError(
            f"tail_bias {request.tail_bias} or inverse_temperature {request.inverse_temperature}: finite"
        )
    if request.inverse_temperature < 0:
        raise RequestError(f"inverse_temperature is {request.inverse_temperature}: at least 0")
    if request.markers and sizes.mark_begin >= sizes.n_tokens:
        raise RequestError("the vocabulary has no markers, so no request can ask for them")


def _in_range(what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise RequestError(f"{what}: {value}, accepted are {low} to {high}")
