"""Whisper with its decoder in the megakernel: windows into slots, requests to the device, records back.

Many windows are decoded together, each in a slot of its own, which it keeps until it is forgotten. Knows slots,
requests and records. Does not know how the device runs (``megakernel.runtime``) or what the encoder computes
(``stage.py``).
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakernel.errors import DeviceError, RequestError
from megakernel.isa import EndReason
from megakernel.mailbox import DoneRecord, Record, TokenRecord
from megakernel.request import Request as SlotRequest

from ..backends import BackendError, device_errors
from .backend import Audio, LanguageGuess, Writing
from .config import SpecialTokens, WhisperConfig
from .decode import Decoded, Request, RuleBook, Rules
from .graph import rule_bitmaps, slot_request
from .stage import Listener, n_attended, on
from .timing import attention_of

log = logging.getLogger(__name__)


class SlotRuntime(Protocol):
    """What is needed of ``megakernel.runtime.Runtime``. Every method may raise ``DeviceError``."""

    def open(self, slot: int, request: SlotRequest) -> int:
        """Ask for ``request``; the slot must be free. Its ticket."""

    def cancel(self, slot: int) -> None:
        """Have the slot done soon."""

    def burst(self) -> None:
        """Begin with what was opened."""

    def wait(self, timeout_s: float) -> Sequence[Record]:
        """The next records; none after ``timeout_s``, or when nothing is open."""

    def leave(self) -> None:
        """With nothing open, have the device free for others when this returns."""

    def close(self) -> None:
        """Give everything back."""


PLAIN, TIMED, LANGUAGES = range(3)  # rules, by their index in the bitmaps


def bitmaps(rules: RuleBook) -> NDArray[np.uint32]:
    """[3, 2, words] of the rules above, as the runtime takes them."""
    return rule_bitmaps([rules.plain, rules.timed, _language_rules(rules.special, len(rules.plain.suppressed))])


def _language_rules(special: SpecialTokens, n_vocab: int) -> Rules:
    suppressed = torch.full((n_vocab,), -torch.inf)
    suppressed[list(special.languages)] = 0.0
    return Rules(special, suppressed, (), with_timestamps=False)


@dataclass(frozen=True, slots=True)
class SlotAudio:
    """A window whose keys and values lie in a slot."""

    slot: int
    n_positions: int  # its own


@dataclass(slots=True)
class _Outcome:
    """What a slot has said so far."""

    tokens: list[int] = field(default_factory=list)  # the end token too
    logprobs: list[float] = field(default_factory=list)
    done: DoneRecord | None = None

    def take(self, record: Record) -> None:
        match record:
            case TokenRecord():
                assert record.index == len(self.tokens), "tokens come in order and once"
                self.tokens.append(record.token)
                self.logprobs.append(record.log_probability)
            case DoneRecord():
                self.done = record


class MegakernelBackend:
    """A checkpoint whose encoder runs in torch and whose decoder runs in a runtime, on one device."""

    def __init__(
        self,
        runtime: SlotRuntime,
        scores: Tensor,
        listener: Listener,
        config: WhisperConfig,
        rules: RuleBook,
        *,
        stream: torch.cuda.Stream | None,
    ) -> None:
        """``runtime`` has the ``bitmaps`` of ``rules``; ``listener`` writes to its cache.

        ``scores`` are the alignment heads', float32 [n_slots, head, n_positions, n_cross_positions], on the device, and
        are worked on in ``stream`` (``None`` on the CPU).
        """
        self._runtime = runtime
        self._scores = scores
        self.listener = listener
        self._config = config
        self._rules = rules
        self._language_rules = _language_rules(rules.special, config.n_vocab)
        self._stream = stream
        self._free = list(range(len(scores)))

    @property
    def max_windows(self) -> int:
        """See ``Backend``."""
        return len(self._scores)

    def listen(self, windows: Sequence[NDArray[np.float32]]) -> list[Audio | None]:
        """See ``Backend``."""
        if len(windows) > len(self._free):
            raise ValueError(f"{len(windows)} windows for {len(self._free)} free slots")
        slots = self._free[: len(windows)]
        with torch.inference_mode(), device_errors():
            lengths = self.listener.listen(windows, slots)
        audios = [
            None if n_positions is None else SlotAudio(slot, n_positions)
            for slot, n_positions in zip(slots, lengths, strict=True)
        ]
        taken = {audio.slot for audio in audios if audio is not None}
        self._free = [slot for slot in self._free if slot not in taken]
        return list(audios)

    def guess_languages(self, audios: Sequence[Audio]) -> list[LanguageGuess]:
        """See ``Backend``. One step each, in which nothing but languages may be written."""
        special = self._rules.special
        request = Request((special.start_of_transcript,), 0, (), (), max_tokens=1)
        own = [_own(audio) for audio in audios]
        asked = {one.slot: self._slot_request(one, request, self._language_rules, LANGUAGES) for one in own}
        outcomes = self._decode(asked)
        picks = [(outcomes[one.slot].tokens[0], outcomes[one.slot].logprobs[0]) for one in own]
        return [LanguageGuess(special.languages.index(token), float(np.exp(logprob))) for token, logprob in picks]

    def write(self, writings: Sequence[Writing]) -> list[Decoded]:
        """See ``Backend``."""
        own = [_own(writing.audio) for writing in writings]
        asked = {
            audio.slot: self._slot_request(
                audio,
                writing.request,
                writing.rules,
                TIMED if writing.rules.with_timestamps else PLAIN,
                temperature=writing.temperature,
            )
            for audio, writing in zip(own, writings, strict=True)
        }
        outcomes = self._decode(asked)
        attentions = self._attentions(own, writings, outcomes)
        return [
            _decoded(writing, outcomes[audio.slot], attention)
            for audio, writing, attention in zip(own, writings, attentions, strict=True)
        ]

    def forget(self, audios: Sequence[Audio]) -> None:
        """See ``Backend``."""
        self._free += [_own(audio).slot for audio in audios]

    def close(self) -> None:
        """See ``Backend``. A kernel that can't be stopped keeps its memory, and perhaps the device."""
        try:
            self._runtime.close()
        except DeviceError as error:
            log.warning("the device was not given back: %s", error)

    def _slot_request(
        self, audio: SlotAudio, request: Request, rules: Rules, rules_index: int, *, temperature: float = 0.0
    ) -> SlotRequest:
        n_tail, stride = self.listener.stage.n_tail, self.listener.stage.stride
        return slot_request(
            request if temperature == 0 else replace(request, draft=()),
            rules,
            self._config,
            rules_index=rules_index,
            temperature=temperature,
            n_positions=n_attended(audio.n_positions, n_tail, stride),
            n_plain=audio.n_positions,
            tail_stride=stride,
        )

    def _decode(self, requests: Mapping[int, SlotRequest]) -> dict[int, _Outcome]:
        """What the slots say to their requests, once all of them are done and the device is free for others."""
        outcomes: dict[int, _Outcome] = {}
        with _runtime_errors():
            try:
                for slot, request in requests.items():
                    self._runtime.open(slot, request)
                    outcomes[slot] = _Outcome()
            except RequestError:
                for slot in outcomes:
                    self._runtime.cancel(slot)
                raise
            finally:
                self._runtime.burst()
                self._collect(outcomes)
        return outcomes

    def _collect(self, outcomes: Mapping[int, _Outcome]) -> None:
        while any(outcome.done is None for outcome in outcomes.values()):
            for record in self._runtime.wait(_WAIT_S):
                if isinstance(record, TokenRecord | DoneRecord):
                    outcomes[record.slot].take(record)
        self._runtime.leave()

    def _attentions(
        self, audios: Sequence[SlotAudio], writings: Sequence[Writing], outcomes: Mapping[int, _Outcome]
    ) -> list[Tensor]:
        """Of each window [n_rows, n_frames], on the host: from the row behind the task to the last that decided.

        Worked out on the device, which leaves one number to be copied where there were as many as alignment heads.
        """
        copies = []
        with device_errors(), torch.inference_mode(), on(self._stream):
            for audio, writing in zip(audios, writings, strict=True):
                request = writing.request
                first = len(request.head) - 1
                rows = slice(first, first + len(request.prefix) + len(outcomes[audio.slot].tokens))
                n_frames = audio.n_positions if request.n_frames is None else request.n_frames
                attention = attention_of(self._scores[audio.slot, :, rows, :n_frames])
                copies.append(attention.to("cpu", non_blocking=True))  # into pinned memory
            if self._stream is not None:
                self._stream.synchronize()
        return copies


_WAIT_S = 1.0  # at a time; the runtime itself finds out when the device stalls


@contextmanager
def _runtime_errors() -> Iterator[None]:
    try:
        yield
    except DeviceError as error:
        raise BackendError(f"{type(error).__name__}: {error}") from error


def _decoded(writing: Writing, outcome: _Outcome, attention: Tensor) -> Decoded:
    assert outcome.done is not None, "decoded to the end"
    has_ended = outcome.done.reason is EndReason.END_TOKEN
    tokens = outcome.tokens[:-1] if has_ended else outcome.tokens
    return Decoded(
        tokens=tuple(tokens),
        logprobs=tuple(outcome.logprobs[: len(tokens)]),
        mean_logprob=sum(outcome.logprobs) / (len(tokens) + 1),
        no_speech_probability=outcome.done.watched,
        temperature=writing.temperature,
        has_ended=has_ended,
        attention=attention,
        n_verified=outcome.done.n_verified,
        n_steps=outcome.done.step,  # of the launch, whose step 0 opens its slots
    )


def _own(audio: Audio) -> SlotAudio:
    if not isinstance(audio, SlotAudio):
        raise TypeError(f"audio of another backend: {type(audio).__name__}")
    return audio
