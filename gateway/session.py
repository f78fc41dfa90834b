"""One caller's session as a state machine: messages, probabilities and hypotheses in, effects out.

Knows the protocol's order, the session's clock of samples and what is still due. Does not know sockets, threads or the
time (``now_s`` is passed in). After each input: carry out the effects in the order given, then offer the session's
work (``windows_to_score``, ``next_decode``) and set a timer for ``next_wake_s``.

    GREETING --hello--> OPEN --bye, or lost past the resume window--> DRAINING --all answered--> CLOSED
"""

import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum, auto
from typing import Protocol, TypeVar, assert_never

import numpy as np
from msgspec import UnsetType, structs
from numpy.typing import NDArray

from gateway.config import SessionConfig
from gateway.effects import Close, CloseStream, Effect, OpenStream, Resume, Send, SentencePaused, UtteranceOver
from gateway.errors import ERRORS, ClientError
from gateway.ingest import AudioFormat, Ingest, suspect, suspect_pace
from gateway.messages import (
    DEFAULT_TURN_THRESHOLD,
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Ack,
    Audio,
    AudioSpec,
    Bye,
    ChunkingItem,
    EngineItem,
    Error,
    Event,
    Farewell,
    Final,
    Flush,
    Flushed,
    Hello,
    Input,
    Limits,
    ModelItem,
    Partial,
    Ready,
    Reformat,
    SpeechEnded,
    SpeechStarted,
    Update,
    Updated,
    Warning,
    WordItem,
)
from streaming.capability import Capability, MissingCapabilityError, Negotiated, negotiate
from streaming.context import Context
from streaming.engine import (
    Chunk,
    DecodeOptions,
    ModelCard,
    StreamWarning,
    Task,
    TransducerContext,
    UnsupportedOptionError,
)
from streaming.pacing import Pacing
from streaming.transcript import EndReason, Hypothesis, Segment, Word, text_of
from streaming.transducer import Chunking, TransducerUtterance, chunking_of
from streaming.utterance import DecodeRequest, Purpose, Utterance
from streaming.window import RollingAudio
from vad import gate as vad_gate
from vad.audio import SAMPLES_PER_MS, AudioFrame, SpeechSpan, samples_from_ms, seconds
from vad.detector import DetectorState
from vad.framer import WINDOW_SAMPLES, Framer, padded
from vad.gate import Gate, GateSettings
from vad.turn import MAX_TURN_SAMPLES

HELLO_TIMEOUT_S = 10.0
STALL_S = 1.0  # no audio for so long, beyond what the last packet held, ends the speech in progress
MAX_RETAINED_S = 60.0  # audio held while decoding is behind; beyond it the socket is not read
ACK_INTERVAL_SAMPLES = samples_from_ms(250)
OPENING_SAMPLES = samples_from_ms(2_000)  # of audio or of time, whichever is over first
MIN_PACE_S = 0.3  # audio that came all at once has no pace
LAG_WARNING_S = 2.0
LAG_WARNING_INTERVAL_S = 10.0
MAX_WINDOWS_A_SCORE = 64  # 2 s of audio, so that a fast sender does not hold up the others in a batch
MAX_LOGGED_EVENTS = 4_096
MAX_BARRIERS = 64  # flushes and updates that wait for the audio before them
MAX_ERROR_CHARACTERS = 1_000  # an error quotes what came, which may be as long as a frame
PIECE_MS = 100  # of audio: what one call of ``receive`` should have to resample at most


class State(Enum):
    """Where the session stands in its life."""

    GREETING = auto()
    OPEN = auto()
    DRAINING = auto()
    CLOSED = auto()


class Priority(IntEnum):
    """What the batcher takes first."""

    FINAL = 0
    PARTIAL = 1


class Computing(Protocol):
    """What a model computes on. It may change: an engine goes on elsewhere when its device fails."""

    @property
    def backend(self) -> str:
        """Its name."""

    @property
    def why(self) -> str:
        """Why no faster one."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as a session sees it."""

    card: ModelCard
    engine: Computing


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """What a client may change between utterances."""

    gate: GateSettings
    partial_interval_ms: int
    sentence_hangover_ms: int | None = None  # silence that ends an utterance which reads complete; None: as any other
    turn_hangover_ms: int | None = None  # and one whose speaker a model of turns takes to be done; None: it isn't asked
    turn_threshold: float = DEFAULT_TURN_THRESHOLD  # the model's probability from which the speaker is
    chunk_ms: int | None = None  # None: what the model recommends
    second_pass: bool = False
    chunking: Chunking | None = None  # what follows from these for a model that decodes in chunks; None: for another
    options: DecodeOptions = field(default_factory=DecodeOptions)

    @property
    def pacing(self) -> Pacing:
        """The pacing that follows."""
        return Pacing(partial_interval_samples=samples_from_ms(self.partial_interval_ms))


@dataclass(frozen=True, slots=True, eq=False)
class DecodeJob:
    """One decode for the engine of ``model``; answer it with ``decoded`` or ``decode_failed``."""

    model: str
    stream_id: int
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class _Barrier:
    """Something ordered behind the audio: takes effect when all before ``at_sample`` has been scored."""

    at_sample: int
    cause: Flush | Update | Bye | EndReason
    settings: StreamSettings | None = None  # of an update


class Transcribing(Protocol):
    """An utterance in work, however its model decodes. ``Utterance`` says what each member is for, and the order."""

    context: Context
    is_over: bool

    @property
    def keep_from_sample(self) -> int:
        """See ``Utterance``."""

    @property
    def is_pause_decoded(self) -> bool:
        """See ``Utterance``."""

    @property
    def reads_complete(self) -> bool:
        """See ``Utterance``."""

    def heard(self, until_sample: int) -> None:
        """See ``Utterance``."""

    def paused(self) -> None:
        """See ``Utterance``."""

    def resumed(self) -> None:
        """See ``Utterance``."""

    def ended(self, *, end_sample: int, speech_end_sample: int, reason: EndReason) -> list[Segment]:
        """See ``Utterance``."""

    def due(self) -> Purpose | None:
        """See ``Utterance``."""

    def next_request(self) -> DecodeRequest | None:
        """See ``Utterance``."""

    def decoded(self, hypothesis: Hypothesis) -> list[Segment]:
        """See ``Utterance``."""

    def failed(self) -> list[Segment]:
        """See ``Utterance``."""


@dataclass(slots=True)
class _Spoken:
    """An utterance in work and the engine stream it is decoded on."""

    utterance: Transcribing
    stream_id: int
    start_sample: int
    settings: StreamSettings
    ended_at_s: float | None = None
    turn_probability: float | None = None  # that the speaker is done, at this pause


class Session:
    """See the module's docstring for the order of use."""

    def __init__(
        self,
        session_id: str,
        models: Mapping[str, ServedModel],
        detector_state: DetectorState,
        *,
        config: SessionConfig,
        gate: GateSettings,
        now_s: float,
        turn_model: str | None = None,
    ) -> None:
        """``models``: the default first. ``config`` and ``gate`` hold where a hello says nothing else.

        ``turn_model`` is the name of the model that ``pause_to_judge`` is for, if there is one.
        """
        self.session_id = session_id
        self.state = State.GREETING
        self._models = models
        self._config = config
        self._began_s = now_s
        self._last_audio_s = now_s
        self._last_packet_s = 0.0
        self._is_in_packet = False  # the rest of the last packet is still to come
        self._lost_s: float | None = None
        # events
        self._n_events = 0
        self._log: dict[int, Event] = {}  # by number, in order; without partials that a newer one has replaced
        self._forgotten_event = 0  # the newest that had to leave the log though nothing replaced it
        self._shown_partial: int | None = None  # number of the partial that the next partial or final replaces
        self._warned: set[str] = set()
        self._lag_warned_s = float("-inf")
        # audio, from bytes to scored windows
        self._ingest: Ingest | None = None
        self._opening: list[NDArray[np.float32]] | None = []  # the first samples, until they have been looked at
        self._first_packet_s = now_s
        self._first_packet_samples = 0
        self._audio = RollingAudio()
        self._framer = Framer()
        self._timeline: deque[AudioFrame | _Barrier] = deque()  # windows to score, and what stands between them
        self._n_scoring = 0
        self._scores: deque[float] = deque()  # of the first windows of the timeline, while a pause is judged
        self._turn_model = turn_model
        self._judging: _Spoken | None = None  # whose pause is to be judged, or at it
        self._pause_sample = 0  # where that was known
        self._is_pause_out = False  # handed out
        self._detector_state = detector_state
        self._gate = Gate(gate)
        self._acked_samples = 0
        # settings, utterances and what waits for them
        self._ready: Ready | None = None
        self._settings = StreamSettings(  # of the next utterance
            gate, config.partial_interval_ms, chunk_ms=config.chunk_ms or None, second_pass=config.second_pass
        )
        self._newest_settings = (
            self._settings
        )  # what the last update asked for; takes effect behind the audio before it
        self._stream_ids = itertools.count(1)
        self._stream_id = 0
        self._segment_ids = itertools.count(1)
        self._spoken: deque[_Spoken] = deque()
        self._n_begun = 0
        self._n_over = 0
        self._n_barriers = 0  # in the timeline or unanswered
        self._unanswered: deque[tuple[int, _Barrier]] = deque()  # with how many utterances must be over first
        self._context = Context()  # of the next utterance

    @property
    def model(self) -> str | None:
        """Name of the model of this session, once it is greeted."""
        return self._ready.model if self._ready else None

    # ------------------------------------------------------------------ inputs from the connection

    def receive(self, message: Input, now_s: float, *, n_bytes_to_come: int = 0) -> list[Effect]:
        """A message came. Audio may be handed over in pieces; ``n_bytes_to_come`` of its packet follow this one."""
        try:
            return self._receive(message, now_s, n_bytes_to_come)
        except ClientError as error:
            return self.refuse(error, message.id if isinstance(message, Flush | Update) else None)

    def refuse(self, error: ClientError, message_id: str | None = None) -> list[Effect]:
        """Tell the client what was wrong with its message; the session goes on unless the error is fatal."""
        kind, message = ERRORS[error.code], str(error)
        if len(message) > MAX_ERROR_CHARACTERS:
            message = message[: MAX_ERROR_CHARACTERS - 1] + "…"
        told = Error(None, error.code, message, kind.is_fatal, message_id)
        effects = [Send(told) if self.state is State.GREETING else self._event(told)]
        return [*effects, Close(kind.close_code, error.code)] if kind.close_code is not None else effects

    def peer_gone(self, now_s: float) -> list[Effect]:
        """The connection is gone. A session that was greeted waits to be resumed."""
        if self.state is State.GREETING:
            return self._close()
        self._lost_s = now_s
        return []

    def resume(self, last_event: int, now_s: float) -> list[Effect]:
        """A new connection takes this session up, having seen every event up to ``last_event``.

        Raises:
            ClientError: ``unknown_session``, if its window has passed or events that were not seen are no longer kept.
        """
        if self._lost_s is not None and now_s >= self._window_end_s(self._lost_s):
            raise ClientError("unknown_session", "the window to resume it has passed; say hello anew")
        if self._ready is None or not self._forgotten_event <= last_event <= self._n_events:
            raise ClientError("unknown_session", "events after last_event are not kept; say hello anew")
        assert self._ingest is not None
        self._lost_s = None
        self._last_audio_s = now_s
        self._ingest.drop_cut_frame()  # the client goes on at a whole sample, with a packet of its own
        self._is_in_packet = False
        self._acked_samples = self._taken_samples
        ready = structs.replace(self._ready, resumed=True, taken_samples=self._taken_samples)
        missed = [Send(event) for number, event in self._log.items() if number > last_event]
        return [Send(ready), *missed, *([Close(1000, "bye")] if self.state is State.CLOSED else [])]

    def wake(self, now_s: float) -> list[Effect]:
        """``next_wake_s`` has come."""
        if self.state is State.GREETING and now_s >= self._began_s + HELLO_TIMEOUT_S:
            return [
                *self.refuse(ClientError("hello_timeout", f"no valid hello within {HELLO_TIMEOUT_S:g} s")),
                *self._close(),
            ]
        if self._lost_s is not None and now_s >= self._window_end_s(self._lost_s):
            if self.state is State.OPEN:
                return self._drain(EndReason.END, now_s)
            if self.state is State.CLOSED:
                self._lost_s = None  # nobody can want it back any more
                return []
        if self._may_stall and now_s >= self._stall_s:
            self._last_audio_s = now_s
            return self._put_barrier(_Barrier(0, EndReason.STALL), now_s)
        return []

    @property
    def next_wake_s(self) -> float | None:
        """When ``wake`` wants to be called, ``None`` for never."""
        if self.state is State.GREETING:
            return self._began_s + HELLO_TIMEOUT_S
        times = []
        if self.state in (State.OPEN, State.CLOSED) and self._lost_s is not None:
            times.append(self._window_end_s(self._lost_s))
        if self._may_stall:
            times.append(self._stall_s)
        return min(times, default=None)

    def is_forgettable(self, now_s: float) -> bool:
        """Whether nobody can want this session any more; one that ended while its client was away can be resumed."""
        return self.state is State.CLOSED and (self._lost_s is None or now_s >= self._window_end_s(self._lost_s))

    def _window_end_s(self, lost_s: float) -> float:
        """Until when a session lost at ``lost_s`` can be resumed."""
        return lost_s + self._config.resume_window_s

    @property
    def piece_bytes(self) -> int:
        """How many bytes of audio ``receive`` should be given at once, so that nobody else waits for long."""
        if self._ingest is None:
            return MAX_FRAME_BYTES
        return self._ingest.format.frame_bytes * self._ingest.format.sample_rate_hz * PIECE_MS // 1_000

    @property
    def wants_audio(self) -> bool:
        """False while so much waits for its decode that reading more, of whatever kind, would only fill memory."""
        return self.retained_s < MAX_RETAINED_S and self._n_barriers < MAX_BARRIERS

    @property
    def audio_s(self) -> float:
        """Seconds of audio taken."""
        return seconds(self._audio.end_sample)

    @property
    def retained_s(self) -> float:
        """Seconds of audio held: a second or two, or what decoding is behind by."""
        return seconds(self._audio.end_sample - self._audio.start_sample)

    @property
    def _is_behind(self) -> bool:
        """Whether so much audio waits that acknowledgements are held back, for the client to slow down."""
        return self.retained_s >= MAX_RETAINED_S / 2

    # ------------------------------------------------------------------ work for the detector

    def windows_to_score(self) -> tuple[DetectorState, NDArray[np.float32]] | None:
        """The windows due [n, WINDOW_SAMPLES] and the state to score them from; answer with ``scored``."""
        if self._n_scoring or self._judging is not None:
            return None
        run = itertools.takewhile(
            lambda item: isinstance(item, AudioFrame), itertools.islice(self._timeline, MAX_WINDOWS_A_SCORE)
        )
        windows = [padded(item.samples) for item in run if isinstance(item, AudioFrame)]
        if not windows:
            return None
        self._n_scoring = len(windows)
        return self._detector_state, np.stack(windows)

    def scored(self, probabilities: NDArray[np.float32], state: DetectorState, now_s: float) -> list[Effect]:
        """The detector's answer: one probability for each window handed out."""
        assert len(probabilities) == self._n_scoring, "as many probabilities as windows"
        self._detector_state = state
        self._n_scoring = 0
        self._scores.extend(probabilities.tolist())
        return self._follow_scores(now_s)

    def _follow_scores(self, now_s: float) -> list[Effect]:
        """Let the gate hear what was scored, up to a pause that is judged first: so what ends there is no matter of
        when the judgement comes.
        """
        effects: list[Effect] = []
        while self._scores and self._judging is None:
            window = self._timeline.popleft()
            assert isinstance(window, AudioFrame)
            events = self._gate.push(window.start_sample, self._scores.popleft())
            effects += self._gated(events, EndReason.SILENCE, now_s)
            if self._gate.is_speech:
                # Never more of the silence behind the voice than the span will have: so the final says the same
                # whether or not a decode happened to come by during the hangover.
                self._spoken[-1].utterance.heard(self._gate.keep_from_sample)
        self._forget_audio(now_s)
        return [*effects, *self._pass_barriers(now_s), *self._acknowledge()]

    # ------------------------------------------------------------------ work for the model of turns

    @property
    def wants_judgement(self) -> bool:
        """Whether ``pause_to_judge`` has something."""
        return self._judging is not None and not self._is_pause_out

    def pause_to_judge(self) -> NDArray[np.float32] | None:
        """The end of a turn [n] up to a pause, to be judged by a ``TurnDetector``; answer with ``judged``."""
        if self._judging is None or self._is_pause_out:
            return None
        self._is_pause_out = True
        start_sample = max(self._judging.start_sample, self._pause_sample - MAX_TURN_SAMPLES)
        return self._audio.samples(SpeechSpan(start_sample, self._pause_sample))

    def judged(self, probability: float | None, now_s: float) -> list[Effect]:
        """How likely the speaker is done; ``None`` if that can't be said, or not in time."""
        spoken, self._judging = self._judging, None
        self._is_pause_out = False
        assert spoken is not None, "an answer without a pause"
        effects: list[Effect] = []
        if spoken.ended_at_s is None and probability is not None:
            assert spoken.settings.turn_hangover_ms is not None
            spoken.turn_probability = probability
            if probability >= spoken.settings.turn_threshold:
                self._gate.hurry(spoken.settings.turn_hangover_ms)
            effects = self._tell_of_pause(spoken)
        return [*effects, *self._follow_scores(now_s)]

    @staticmethod
    def _tell_of_pause(spoken: _Spoken) -> list[Effect]:
        """What a door may want to know of a pause, once the words before it have been sent."""
        if not spoken.utterance.is_pause_decoded:
            return []
        if spoken.turn_probability is None and not spoken.utterance.reads_complete:
            return []
        return [SentencePaused(spoken.turn_probability)]

    # ------------------------------------------------------------------ work for the engine

    @property
    def decode_priority(self) -> Priority | None:
        """Whether a decode is due, and how urgent it is."""
        purpose = self._spoken[0].utterance.due() if self._spoken else None
        if purpose is None:
            return None
        return Priority.PARTIAL if purpose is Purpose.PARTIAL else Priority.FINAL

    def next_decode(self) -> DecodeJob | None:
        """The decode that is due, over the newest audio."""
        if not self._spoken:
            return None
        head = self._spoken[0]
        request = head.utterance.next_request()
        if request is None:
            return None
        chunk = Chunk(
            span=request.span,
            samples=self._audio.samples(request.span),
            is_final=request.is_final,
            prompt=request.prompt,
            prefix=request.prefix,
            left_context_samples=request.left_context_samples,
            right_context_samples=request.right_context_samples,
            is_first=request.is_first,
        )
        assert self._ready is not None
        return DecodeJob(self._ready.model, head.stream_id, chunk)

    def opened(self, warnings: Iterable[StreamWarning]) -> list[Effect]:
        """An engine stream is open; ``warnings`` say what it only half honours."""
        return [self._event(Warning(0, warning.code, warning.message)) for warning in warnings]

    def decoded(self, hypothesis: Hypothesis, now_s: float) -> list[Effect]:
        """The engine's answer to the decode handed out."""
        head = self._spoken[0]
        segments = head.utterance.decoded(hypothesis)
        if head is not self._spoken[-1] or head.utterance.is_over:
            return self._transcribed(segments, now_s)
        if head.utterance.reads_complete and head.settings.sentence_hangover_ms is not None:
            self._gate.hurry(head.settings.sentence_hangover_ms)
        is_judged = head is not self._judging
        return [*self._transcribed(segments, now_s), *(self._tell_of_pause(head) if is_judged else [])]

    def decode_failed(self, message: str, now_s: float) -> list[Effect]:
        """The engine failed on the decode handed out."""
        head = self._spoken[0]
        error = self._event(Error(0, "decode_failed", message, fatal=False))
        return [error, *self._transcribed(head.utterance.failed(), now_s)]

    # ------------------------------------------------------------------ messages

    def _receive(self, message: Input, now_s: float, n_bytes_to_come: int) -> list[Effect]:
        if self.state is State.GREETING:
            if not isinstance(message, Hello):
                raise ClientError("hello_required", "say hello first, with the audio's format")
            return self._greet(message, now_s)
        if self.state is not State.OPEN:
            return []  # said bye already: nothing more is taken
        match message:
            case Hello():
                raise ClientError("already_greeted", "the session is open; change its settings with update")
            case Audio(data):
                return self._take(data, now_s, n_bytes_to_come)
            case Flush():
                return self._put_barrier(_Barrier(0, message), now_s)
            case Update():
                self._newest_settings = self._changed(self._newest_settings, message)
                return self._put_barrier(_Barrier(0, message, self._newest_settings), now_s, drains=False)
            case Bye():
                return self._drain(message, now_s)
            case Reformat(audio):
                return self._reformat(Ingest(_audio_format(audio)), now_s)
            case _:
                assert_never(message)

    def _greet(self, hello: Hello, now_s: float) -> list[Effect]:
        if not isinstance(hello.resume, UnsetType):
            return [Resume(hello.resume.session_id, hello.resume.last_event)]
        assert not isinstance(hello.audio, UnsetType)
        ingest = Ingest(_audio_format(hello.audio))
        name = _or(hello.model, next(iter(self._models)))
        if name not in self._models:
            raise ClientError("unknown_model", f"no model {name!r} here; there are {', '.join(self._models)}")
        card = self._models[name].card
        negotiated = _negotiate(card, _or(hello.require, ()), _or(hello.prefer, ()))
        settings = _settings_from(hello, self._settings, card, self._config, self._turn_model)
        self._ingest = ingest
        self._settings = self._newest_settings = settings
        self._gate = Gate(settings.gate)
        self.state = State.OPEN
        self._last_audio_s = now_s
        unknown = tuple(wish for wish in _or(hello.prefer, ()) if wish not in set(Capability))
        self._ready = Ready(
            protocol=PROTOCOL_VERSION,
            session_id=self.session_id,
            resumed=False,
            taken_samples=0,
            model=name,
            language=settings.options.language or (card.languages[0] if len(card.languages) == 1 else None),
            granted=tuple(sorted(negotiated.granted)),
            declined=(*sorted(negotiated.declined), *unknown),
            engine=EngineItem(self._models[name].engine.backend, self._models[name].engine.why),
            models=tuple(model_item(served.card) for served in self._models.values()),
            limits=Limits(MAX_FRAME_BYTES, self._config.max_unacked_s, self._config.resume_window_s),
            chunking=_chunking_item(settings.chunking),
            turn_model=self._turn_model,
        )
        return [Send(self._ready), self._open_stream(settings.options)]

    def _changed(self, settings: StreamSettings, update: Update) -> StreamSettings:
        assert self._ready is not None
        card = self._models[self._ready.model].card
        return _settings_from(update, settings, card, self._config, self._turn_model)

    def _open_stream(self, options: DecodeOptions) -> Effect:
        assert self._ready is not None
        self._stream_id = next(self._stream_ids)
        return OpenStream(self._stream_id, self._ready.model, options)

    # ------------------------------------------------------------------ audio

    @property
    def _taken_samples(self) -> int:
        return self._ingest.input_samples_taken if self._ingest else 0

    def _take(self, data: bytes, now_s: float, n_bytes_to_come: int) -> list[Effect]:
        if not data:
            raise ClientError("empty_audio", "an audio frame without bytes")
        assert self._ingest is not None
        self._last_audio_s = now_s
        result = self._ingest.push(data)
        self._last_packet_s = (self._last_packet_s if self._is_in_packet else 0.0) + seconds(len(result.samples))
        self._is_in_packet = n_bytes_to_come > 0
        effects: list[Effect] = []
        if result.n_non_finite:
            effects += self._warn_once("non_finite_samples", "NaN or infinite samples were taken as silence")
        if result.n_clipped:
            effects += self._warn_once("clipped_samples", "samples outside -1..1 were clipped; f32le audio lies inside")
        self._append(result.samples, now_s)
        return [
            *effects,
            *self._look_for_wrong_format(result.samples, now_s),
            *self._acknowledge(),
            *self._pass_barriers(now_s),
        ]

    def _reformat(self, ingest: Ingest, now_s: float) -> list[Effect]:
        """Go on with another format, at the sample where the audio so far ends."""
        assert self._ingest is not None
        self._append(self._ingest.flush().samples, now_s)
        self._ingest = ingest
        self._acked_samples = 0
        return self._pass_barriers(now_s)

    def _append(self, samples: NDArray[np.float32], now_s: float) -> None:
        if len(samples):
            self._audio.append(AudioFrame(self._audio.end_sample, samples))
            self._timeline.extend(self._framer.push(samples))
            self._forget_audio(now_s)

    def _look_for_wrong_format(self, samples: NDArray[np.float32], now_s: float) -> list[Effect]:
        """Look at the first two seconds once: a format declared wrongly sounds like loud noise, or comes too fast."""
        if self._opening is None:
            return []
        if not self._opening:
            self._first_packet_s = now_s
        if len(samples):
            self._opening.append(samples)
        if self._is_in_packet:
            return []
        n_samples = self._audio.end_sample
        self._first_packet_samples = self._first_packet_samples or n_samples
        since_first_s = now_s - self._first_packet_s
        if n_samples < OPENING_SAMPLES and since_first_s < seconds(OPENING_SAMPLES):
            return []
        doubt = suspect(np.concatenate(self._opening)[:OPENING_SAMPLES]) if self._opening else None
        if doubt is None and since_first_s > MIN_PACE_S:
            assert self._ingest is not None
            pace = seconds(n_samples - self._first_packet_samples) / since_first_s
            doubt = suspect_pace(pace, self._ingest.format.sample_rate_hz)
        self._opening = None
        return [self._event(Warning(0, "audio_suspect", doubt))] if doubt else []

    def _acknowledge(self, *, at_once: bool = False) -> list[Effect]:
        """An ack when enough was taken; held back while decoding is behind, so that the client slows down."""
        assert self._ingest is not None
        news = self._taken_samples - self._acked_samples
        is_due = news * 16_000 >= ACK_INTERVAL_SAMPLES * self._ingest.format.sample_rate_hz or (at_once and news > 0)
        if not is_due or self._is_behind:
            return []
        self._acked_samples = self._taken_samples
        return [Send(Ack(self._acked_samples))]

    def _forget_audio(self, now_s: float) -> None:
        was_behind = self._is_behind
        in_work = [spoken.utterance.keep_from_sample for spoken in self._spoken]
        # A flush inside a window that was filled up with zeros takes the gate back by less than a window.
        keep_from_sample = self._gate.keep_from_sample - WINDOW_SAMPLES
        led = []
        if not in_work and self._context.leads_to(keep_from_sample):  # for an utterance that may begin any moment
            led.append(self._context.lead_start_sample)
        if self._spoken and self._spoken[-1].settings.turn_hangover_ms is not None:  # to be judged at its next pause
            led.append(max(self._spoken[-1].start_sample, keep_from_sample - MAX_TURN_SAMPLES))
        self._audio.drop_before(min([keep_from_sample, *in_work, *led]))
        if was_behind and not self._is_behind:
            self._last_audio_s = now_s  # the client paused for us: it has not stalled

    # ------------------------------------------------------------------ barriers

    def _drain(self, cause: Bye | EndReason, now_s: float) -> list[Effect]:
        self.state = State.DRAINING
        return self._put_barrier(_Barrier(0, cause), now_s)

    def _put_barrier(self, barrier: _Barrier, now_s: float, *, drains: bool = True) -> list[Effect]:
        """Order ``barrier`` behind the audio so far; ``drains``: its last samples are scored first too."""
        assert self._ingest is not None
        effects: list[Effect] = []
        if drains:
            tail = self._ingest.flush()
            self._append(tail.samples, now_s)
            if tail.n_dropped_bytes and isinstance(barrier.cause, Bye):
                effects += self._warn_once(
                    "incomplete_sample", f"{tail.n_dropped_bytes} bytes at the end are no whole sample"
                )
            rest = self._framer.flush()
            if rest is not None:
                self._timeline.append(rest)
        self._n_barriers += 1
        self._timeline.append(replace(barrier, at_sample=self._framer.end_sample))
        return [*effects, *self._acknowledge(at_once=True), *self._pass_barriers(now_s)]

    def _pass_barriers(self, now_s: float) -> list[Effect]:
        """Let every barrier take effect that no unscored window stands before."""
        effects: list[Effect] = []
        while not self._n_scoring and self._timeline and isinstance(barrier := self._timeline[0], _Barrier):
            self._timeline.popleft()
            effects += self._pass(barrier, now_s)
        return [*effects, *self._answer_barriers(now_s)]

    def _pass(self, barrier: _Barrier, now_s: float) -> list[Effect]:
        match barrier.cause:
            case Update(id):
                assert barrier.settings is not None
                return self._apply(id, barrier.settings, barrier.at_sample)
            case Flush():
                reason = EndReason.FLUSH
            case Bye():
                reason = EndReason.END
            case EndReason():
                reason = barrier.cause
            case _:
                assert_never(barrier.cause)
        effects = self._gated(self._gate.force_end(barrier.at_sample), reason, now_s) if barrier.at_sample else []
        self._unanswered.append((self._n_begun, barrier))
        return effects

    def _apply(self, update_id: str, settings: StreamSettings, at_sample: int) -> list[Effect]:
        effects: list[Effect] = []
        if settings.options != self._settings.options:
            unused = self._stream_id if all(spoken.stream_id != self._stream_id for spoken in self._spoken) else None
            effects.append(self._open_stream(settings.options))
            if unused is not None:
                effects.append(CloseStream(unused))
            self._context = Context()
        self._n_barriers -= 1
        self._settings = settings
        self._gate.settings = settings.gate
        assert self._ready is not None
        self._ready = structs.replace(self._ready, chunking=_chunking_item(settings.chunking))  # for a resume
        return [*effects, self._event(Updated(0, update_id, _wire_s(at_sample)))]

    def _answer_barriers(self, now_s: float) -> list[Effect]:
        """Answer every barrier whose utterances are over."""
        effects: list[Effect] = []
        while self._unanswered and self._unanswered[0][0] <= self._n_over:
            _, barrier = self._unanswered.popleft()
            self._n_barriers -= 1
            match barrier.cause:
                case Flush(id):
                    effects.append(self._event(Flushed(0, id, _wire_s(barrier.at_sample))))
                case Bye() | EndReason.END:
                    effects.append(self._event(Farewell(0, reason="bye", audio_s=_wire_s(barrier.at_sample))))
                    effects += [Close(1000, "bye"), *self._close()]
        return effects

    def _close(self) -> list[Effect]:
        self.state = State.CLOSED
        effects: list[Effect] = []
        if self._stream_id:
            effects.append(CloseStream(self._stream_id))
        self._stream_id = 0
        return effects

    # ------------------------------------------------------------------ speech

    @property
    def _may_stall(self) -> bool:
        """Whether speech is open that a silent client would leave hanging."""
        return self.state is State.OPEN and (self._gate.is_speech or self._gate.is_pending) and not self._is_behind

    @property
    def _stall_s(self) -> float:
        """When the next packet is overdue: a client that sends whole seconds at a time is given that time as well."""
        return self._last_audio_s + self._last_packet_s + STALL_S

    def _gated(self, events: list[vad_gate.GateEvent], reason: EndReason, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for event in events:
            match event:
                case vad_gate.SpeechStarted(start_sample, onset_sample):
                    effects.append(self._event(SpeechStarted(0, _wire_s(start_sample), _wire_s(onset_sample))))
                    self._begin_utterance(start_sample)
                case vad_gate.SpeechPaused(at_sample):
                    self._spoken[-1].utterance.heard(self._gate.keep_from_sample)
                    self._spoken[-1].utterance.paused()
                    if self._spoken[-1].settings.turn_hangover_ms is not None:
                        self._judging, self._pause_sample = self._spoken[-1], at_sample
                case vad_gate.SpeechResumed():
                    self._spoken[-1].utterance.resumed()
                    self._spoken[-1].turn_probability = None
                case vad_gate.SpeechEnded(end_sample, speech_end_sample):
                    effects.append(self._event(SpeechEnded(0, _wire_s(speech_end_sample), _wire_s(end_sample))))
                    spoken = self._spoken[-1]
                    spoken.ended_at_s = now_s
                    if not self._is_pause_out:
                        self._judging = None
                    segments = spoken.utterance.ended(
                        end_sample=end_sample, speech_end_sample=speech_end_sample, reason=reason
                    )
                    effects += self._transcribed(segments, now_s)
                case _:
                    assert_never(event)
        return effects

    def _begin_utterance(self, start_sample: int) -> None:
        utterance = self._new_utterance(start_sample, self._settings)
        self._spoken.append(_Spoken(utterance, self._stream_id, start_sample, self._settings))
        self._n_begun += 1
        if len(self._spoken) == 1:
            self._prepare_head()

    def _new_utterance(self, start_sample: int, settings: StreamSettings) -> Transcribing:
        if settings.chunking is not None:
            return TransducerUtterance(
                start_sample=start_sample,
                segment_ids=self._segment_ids,
                chunking=settings.chunking,
                pacing=settings.pacing,
            )
        return Utterance(
            start_sample=start_sample,
            segment_ids=self._segment_ids,
            pacing=settings.pacing,
            policy=self._config.commit_policy,
        )

    def _prepare_head(self) -> None:
        """Tell the utterance that is decoded next what was said just before it."""
        head = self._spoken[0]
        head.utterance.context = self._context.for_speech_at(head.start_sample)

    def _transcribed(self, segments: list[Segment], now_s: float) -> list[Effect]:
        effects: list[Effect] = [self._event(_segment_event(segment)) for segment in segments]
        while self._spoken and self._spoken[0].utterance.is_over:
            effects += self._retire(self._spoken.popleft(), now_s)
        self._forget_audio(now_s)
        return [*effects, *self._answer_barriers(now_s), *self._acknowledge()]

    def _retire(self, spoken: _Spoken, now_s: float) -> list[Effect]:
        self._n_over += 1
        next_stream_id = self._spoken[0].stream_id if self._spoken else self._stream_id
        # Text decoded with other options, in another language say, would only mislead.
        self._context = spoken.utterance.context if next_stream_id == spoken.stream_id else Context()
        effects = [UtteranceOver(spoken.turn_probability), *self._report_lag(spoken, now_s)]
        if spoken.stream_id != self._stream_id and all(other.stream_id != spoken.stream_id for other in self._spoken):
            effects.append(CloseStream(spoken.stream_id))
        if self._spoken:
            self._prepare_head()
        return effects

    def _report_lag(self, spoken: _Spoken, now_s: float) -> list[Effect]:
        """Say so when finals come late though the client sends no faster than real time."""
        lag_s = now_s - (spoken.ended_at_s if spoken.ended_at_s is not None else now_s)
        is_live = seconds(self._audio.end_sample) <= now_s - self._began_s + 1.0
        if lag_s < LAG_WARNING_S or not is_live or now_s - self._lag_warned_s < LAG_WARNING_INTERVAL_S:
            return []
        self._lag_warned_s = now_s
        return [self._event(Warning(0, "lagging", f"finals are {lag_s:.1f} s late; partials are shed first"))]

    # ------------------------------------------------------------------ events

    def _event(self, event: Event) -> Effect:
        """Number ``event``, keep it for a resume and send it."""
        self._n_events += 1
        numbered = structs.replace(event, event=self._n_events)
        if isinstance(event, Partial | Final):
            # Segments come in order, so the partial shown last is of this one or of one that had no words in the end.
            self._log.pop(self._shown_partial or 0, None)
            self._shown_partial = self._n_events if isinstance(event, Partial) else None
        self._log[self._n_events] = numbered
        if len(self._log) > MAX_LOGGED_EVENTS:
            self._forgotten_event = next(iter(self._log))
            del self._log[self._forgotten_event]
        return Send(numbered)

    def _warn_once(self, code: str, message: str) -> list[Effect]:
        if code in self._warned:
            return []
        self._warned.add(code)
        return [self._event(Warning(0, code, message))]


_Value = TypeVar("_Value")


def _or(value: _Value | UnsetType, default: _Value) -> _Value:
    return default if isinstance(value, UnsetType) else value


def _audio_format(spec: AudioSpec) -> AudioFormat:
    try:
        return AudioFormat(spec.encoding, spec.sample_rate_hz, spec.channels, spec.channel)
    except ValueError as error:
        raise ClientError("unsupported_audio", str(error)) from error


def _negotiate(card: ModelCard, require: Iterable[str], prefer: Iterable[str]) -> Negotiated:
    known = {str(capability) for capability in Capability}
    missing = [name for name in require if name not in known]
    try:
        negotiated = negotiate(
            card.capabilities,
            {Capability(name) for name in require if name in known},
            {Capability(name) for name in prefer if name in known},
        )
    except MissingCapabilityError as error:
        missing += sorted(error.missing)
    if missing:
        offered = ", ".join(sorted(card.capabilities))
        raise ClientError("missing_capability", f"{card.name} does not offer {', '.join(missing)}; it offers {offered}")
    return negotiated


def _settings_from(
    message: Hello | Update, base: StreamSettings, card: ModelCard, config: SessionConfig, turn_model: str | None
) -> StreamSettings:
    """``base`` with what ``message`` says, checked against what the model can do."""
    task = _or(message.task, base.options.task)
    if task not in set(Task):
        raise ClientError("unsupported_option", f"no task {task!r}; there are {', '.join(Task)}")
    options = DecodeOptions(
        language=_or(message.language, base.options.language),
        task=Task(task),
        vocabulary=_or(message.vocabulary, base.options.vocabulary),
        context=_or(message.context, base.options.context),
    )
    try:
        card.check(options)
    except UnsupportedOptionError as error:
        raise ClientError("unsupported_option", str(error)) from error
    sentence_hangover_ms = _or(message.sentence_hangover_ms, base.sentence_hangover_ms)
    if sentence_hangover_ms is not None and Capability.PUNCTUATION not in card.capabilities:
        raise ClientError("unsupported_option", f"{card.name} writes no punctuation, which sentence_hangover_ms needs")
    turn_hangover_ms = _or(message.turn_hangover_ms, base.turn_hangover_ms)
    if turn_hangover_ms is not None and turn_model is None:
        raise ClientError("unsupported_option", "this server has no model of turns, which turn_hangover_ms needs")
    settings = StreamSettings(
        options=options,
        sentence_hangover_ms=sentence_hangover_ms,
        turn_hangover_ms=turn_hangover_ms,
        turn_threshold=_or(message.turn_threshold, base.turn_threshold),
        gate=_gate_from(message, base.gate),
        partial_interval_ms=_or(message.partial_interval_ms, base.partial_interval_ms),
        chunk_ms=_or(message.chunk_ms, base.chunk_ms),
        second_pass=_or(message.second_pass, base.second_pass),
    )
    if card.transducer is not None:
        return replace(settings, chunking=_chunking_from(settings, card, card.transducer, config))
    if chosen := [name for name in ("chunk_ms", "second_pass") if _or(getattr(message, name), None)]:
        raise ClientError("unsupported_option", f"{card.name} does not decode in chunks, which {chosen[0]} is about")
    return settings


def _chunking_from(
    settings: StreamSettings, card: ModelCard, context: TransducerContext, config: SessionConfig
) -> Chunking:
    """Partials come with every chunk; who wants fewer of them than usual gets longer chunks."""
    wants_fewer = settings.partial_interval_ms > config.partial_interval_ms
    try:
        return chunking_of(
            context,
            card.max_window_samples,
            chunk_samples=None if settings.chunk_ms is None else samples_from_ms(settings.chunk_ms),
            left_samples=samples_from_ms(config.left_context_ms) or None,
            interval_samples=samples_from_ms(settings.partial_interval_ms) if wants_fewer else 0,
            second_pass=settings.second_pass,
        )
    except ValueError as error:
        raise ClientError("unsupported_option", f"chunk_ms: {error}") from error


def _chunking_item(chunking: Chunking | None) -> ChunkingItem | None:
    if chunking is None:
        return None
    return ChunkingItem(
        chunk_ms=chunking.chunk_samples // SAMPLES_PER_MS,
        right_context_ms=chunking.right_samples // SAMPLES_PER_MS,
        latency_ms=chunking.latency_samples // SAMPLES_PER_MS,
        first_ms=chunking.first_samples // SAMPLES_PER_MS,
        second_pass=chunking.second_pass,
    )


def _gate_from(message: Hello | Update, base: GateSettings) -> GateSettings:
    threshold = _or(message.speech_threshold, base.threshold)
    return replace(
        base,
        threshold=threshold,
        negative_threshold=max(0.01, base.negative_threshold * (threshold / base.threshold)),  # hysteresis as before
        hangover_ms=_or(message.hangover_ms, base.hangover_ms),
        pre_roll_ms=_or(message.pre_roll_ms, base.pre_roll_ms),
    )


def model_item(card: ModelCard) -> ModelItem:
    """A model as ``ready`` and ``/v1/models`` list it."""
    return ModelItem(card.name, card.languages, tuple(sorted(card.capabilities)))


def _wire_s(sample: int) -> float:
    return round(seconds(sample), 3)


def _word_item(word: Word) -> WordItem:
    return WordItem(
        text=word.text,
        start_s=None if word.start_sample is None else _wire_s(word.start_sample),
        end_s=None if word.end_sample is None else _wire_s(word.end_sample),
        confidence=None if word.confidence is None else round(word.confidence, 3),
    )


def _segment_event(segment: Segment) -> Partial | Final:
    partial = Partial(
        event=0,
        segment=segment.segment_id,
        revision=segment.revision,
        text=text_of(segment.words),
        start_s=_wire_s(segment.span.start_sample),
        end_s=_wire_s(segment.span.end_sample),
        words=tuple(_word_item(word) for word in segment.words),
        n_committed=segment.n_committed,
        language=segment.language,
    )
    if segment.end_reason is None:
        return partial
    return Final(**structs.asdict(partial), reason=segment.end_reason.value)
