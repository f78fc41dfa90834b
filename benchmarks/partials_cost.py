"""What it costs to decode a growing window again and again, beside decoding each window afresh.

Run from the project's root:

    python -m benchmarks.partials_cost --models whisper-tiny.en whisper-base

The first 30 s of each clip of at least 10 s are one utterance, in two ways. "Streamed": the requests are those that a
session makes of it, half a second apart, with what is settled as prefix, the rest of the last partial as draft, and a
cut after 15 s. "Unsettled": the window grows by half a second and nothing is ever settled, so that all of the text is
draft. Either is timed beside the same windows with nothing carried over: neither prompt, prefix nor draft. A call of
one step tells apart what a call costs and what its steps do. Only the decoder is timed, alignment included; a draft
must not change a token. On a GPU the time is the wall's, on a CPU the process's.

Clips are those of SENSEWAY_CLIPS (benchmarks/clips.py), else the two recordings that the models' cache holds. An
English model should get English ones: of other languages it writes something else every time.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.clips import Clip, known_clips
from benchmarks.report import heading
from models.backends import Backends, Offer
from models.devices import TORCH_CPU
from models.store import find_model
from models.timeline import Timeline
from models.tokenizer import WhisperTokenizer
from models.whisper.backend import Audio, Backend, LanguageGuess, Writing
from models.whisper.decode import Decoded, Request
from models.whisper.engine import WhisperEngine, WhisperStream
from models.whisper.loading import offers, read_model
from models.whisper.vocabulary import rule_book
from models.whisper.window import WINDOW_SAMPLES
from streaming.engine import Chunk, DecodeOptions
from streaming.pacing import Pacing
from streaming.transcript import EndReason
from streaming.utterance import Utterance
from vad.audio import SpeechSpan, samples_from_ms

MIN_CLIP_S = 10.0
GROWTH_SAMPLES = samples_from_ms(500)
PACKET_SAMPLES = samples_from_ms(50)


@dataclass(slots=True)
class Calls:
    """Sums over calls of the decoder, one window each."""

    n_steps: int = 0
    took_s: float = 0.0

    def step_us(self, n_calls: int, one_step_s: float) -> float:
        """What a step behind the first costs, given what ``n_calls`` of one step took."""
        return 1e6 * (self.took_s - one_step_s) / max(self.n_steps - n_calls, 1)


class Measured:
    """A backend that writes each window in several ways, and keeps what that took. Fulfils ``Backend``."""

    def __init__(self, backend: Backend, clock_s: Callable[[], float]) -> None:
        self._backend = backend
        self._clock_s = clock_s
        self.begin()

    def begin(self) -> None:
        """Forget what was measured."""
        self.n_windows = 0
        self.n_tokens = 0  # written afresh
        self.n_settled = 0  # given as prefix
        self.n_written = 0  # behind the prefix
        self.n_verified = 0  # of these, from the draft
        self.n_different = 0  # windows whose text depends on the draft
        self.afresh, self.asked, self.shortest = Calls(), Calls(), Calls()

    @property
    def max_windows(self) -> int:
        """See ``Backend``."""
        return 1

    def listen(self, windows: Sequence[NDArray[np.float32]]) -> list[Audio | None]:
        """See ``Backend``."""
        return self._backend.listen(windows)

    def guess_languages(self, audios: Sequence[Audio]) -> list[LanguageGuess]:
        """See ``Backend``."""
        return self._backend.guess_languages(audios)

    def forget(self, audios: Sequence[Audio]) -> None:
        """See ``Backend``."""
        self._backend.forget(audios)

    def close(self) -> None:
        """See ``Backend``."""
        self._backend.close()

    def write(self, writings: Sequence[Writing]) -> list[Decoded]:
        """What was asked for. A text that is drawn has no draft and is not measured."""
        return [self._write(writing) if writing.temperature == 0 else self._once(writing) for writing in writings]

    def _write(self, writing: Writing) -> Decoded:
        request = writing.request
        plain = replace(request.without_prompt(), prefix=(), draft=())
        asked = self._timed(writing, request, self.asked)
        afresh = self._timed(writing, plain, self.afresh)
        self._timed(writing, replace(plain, max_tokens=1), self.shortest)
        again = self._once(replace(writing, request=replace(request, draft=()))) if request.prefix else afresh
        self.n_windows += 1
        self.n_tokens += len(afresh.tokens)
        self.n_settled += len(request.prefix)
        self.n_written += len(asked.tokens)
        self.n_verified += asked.n_verified
        self.n_different += asked.tokens != again.tokens
        return asked

    def _timed(self, writing: Writing, request: Request, calls: Calls) -> Decoded:
        began_s = self._clock_s()
        decoded = self._once(replace(writing, request=request))
        calls.took_s += self._clock_s() - began_s
        calls.n_steps += decoded.n_steps
        return decoded

    def _once(self, writing: Writing) -> Decoded:
        (decoded,) = self._backend.write([writing])
        return decoded


def stream(engine: WhisperEngine, clip: Clip) -> None:
    """Decode whatever a session would of one utterance, without waiting for the time to pass."""
    own = engine.open(DecodeOptions())
    utterance = Utterance(start_sample=0, segment_ids=itertools.count(), pacing=Pacing())
    for end in range(PACKET_SAMPLES, len(clip.samples), PACKET_SAMPLES):
        utterance.heard(end)
        _follow(engine, own, utterance, clip)
    n_samples = len(clip.samples)
    utterance.ended(end_sample=n_samples, speech_end_sample=n_samples, reason=EndReason.END)
    _follow(engine, own, utterance, clip)


def _follow(engine: WhisperEngine, own: WhisperStream, utterance: Utterance, clip: Clip) -> None:
    while (request := utterance.next_request()) is not None:
        chunk = Chunk(
            span=request.span,
            samples=clip.samples[request.span.start_sample : request.span.end_sample],
            is_final=request.is_final,
            prompt=request.prompt,
            prefix=request.prefix,
            left_context_samples=request.left_context_samples,
        )
        (hypothesis,) = engine.decode([(own, chunk)])
        utterance.decoded(hypothesis)


def grow(engine: WhisperEngine, clip: Clip) -> None:
    """Decode the clip's beginning, half a second more each time."""
    own = engine.open(DecodeOptions())
    for end in range(2 * GROWTH_SAMPLES, len(clip.samples) + GROWTH_SAMPLES, GROWTH_SAMPLES):
        window = clip.samples[:end]
        engine.decode([(own, Chunk(SpeechSpan(0, len(window)), window, is_final=False))])


WAYS = {"streamed": stream, "unsettled": grow}


def row(model: str, way: str, backend: str, measured: Measured) -> str:
    """One line of the table."""
    n, one_step_s = measured.n_windows, measured.shortest.took_s
    afresh, asked = measured.afresh, measured.asked
    cells = [
        *(model, way, backend, f"{n}"),
        *(f"{count / n:.1f}" for count in (measured.n_tokens, measured.n_settled, measured.n_written)),
        f"{100 * measured.n_verified / max(measured.n_written, 1):.0f} %",
        *(f"{calls.n_steps / n:.1f}" for calls in (afresh, asked)),
        f"{1e6 * one_step_s / n:.0f}",
        *(f"{calls.step_us(n, one_step_s):.0f}" for calls in (afresh, asked)),
        *(f"{calls.took_s:.2f}" for calls in (afresh, asked)),
        f"1/{afresh.took_s / asked.took_s:.1f}",
        f"{measured.n_different}",
    ]
    return f"| {' | '.join(cells)} |"


HEADER = (
    "| model | way | backend | windows | tokens of one afresh | settled | written behind | of these from the draft "
    "| steps afresh | steps | call of one step, µs | each further one afresh, µs | with draft, µs "
    "| afresh, s | as asked, s | cost | differ |\n|---|---|---|" + "---:|" * 14
)


def open_engine(name: str, *, on_cpu: bool) -> tuple[WhisperEngine, Measured]:
    """The model on the fastest backend of this machine, or the CPU's, and what measures it."""
    files = find_model(name, fetch_missing=True)
    model = read_model(files)
    tokenizer = WhisperTokenizer.load(files.tokenizer)
    every = offers(lambda: read_model(files), rule_book(tokenizer, model.config.n_vocab), Timeline())
    plain = Backends([offer for offer in every if offer.name == TORCH_CPU or not on_cpu], model=name)
    measured = Measured(plain.current, time.process_time if plain.name == TORCH_CPU else time.perf_counter)
    backends = Backends[Backend]([Offer(plain.name, lambda: measured)], model=name)
    return WhisperEngine(backends, model.config, tokenizer, name=name), measured


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["whisper-tiny.en", "whisper-base"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--cpu", action="store_true", help="on the CPU also where there is a GPU")
    parser.add_argument("--max-clips", type=int, default=20)
    arguments = parser.parse_args()
    long = [clip for clip in known_clips() if clip.duration_s >= MIN_CLIP_S - 0.1][: arguments.max_clips]
    clips = [Clip(clip.name, clip.samples[:WINDOW_SAMPLES]) for clip in long]
    torch.set_num_threads(1)
    print(heading("Decoding a growing window again, beside decoding each window afresh"))
    print(f"{len(clips)} clips of at least {MIN_CLIP_S:.0f} s.\n\n{HEADER}")
    for name in arguments.models:
        engine, measured = open_engine(name, on_cpu=arguments.cpu)
        stream(engine, clips[0])  # warm
        for way in arguments.ways:
            measured.begin()
            for clip in clips:
                WAYS[way](engine, clip)
            print(row(name, way, engine.backend, measured), flush=True)
        measured.close()


if __name__ == "__main__":
    main()
