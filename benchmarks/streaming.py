"""Recordings streamed at real time over real sockets: error rate, latency and text out of nothing.

A server in a process of its own; ``--streams`` clients at once, each sending one clip after another in packets of
50 ms, with a second and a half of silence behind each. Latencies count from the words' times in the manifest: the
first partial from the start of the first word, the final from the end of the last, hangover included. In the same
run the model transcribes the same clips offline, whole, so that the cost of streaming stands beside it.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.recordings import DEFAULT_MANIFEST, ENGLISH, Answer, Recording, TimedWord, read_manifest, score
from benchmarks.report import heading
from gateway.client import AudioFormat, Final, Hello, Partial, SpeechEnded, connect
from gateway.commands.demo import serving
from models.catalog import load_engine
from streaming.engine import DecodeOptions
from vad.audio import SAMPLE_RATE_HZ

PACKET_SAMPLES = 800
SILENCE_BEHIND_S = 1.5


@dataclass
class Heard:
    """What came back for one clip."""

    finals: list[Final] = field(default_factory=list)
    first_text_s: float | None = None
    last_final_s: float | None = None
    from_voice_end_s: list[float] = field(default_factory=list)  # of each final that a pause ended

    def answer(self) -> Answer:
        """Text and timed words of the finals."""
        words = tuple((w.text, w.start_s or 0.0, w.end_s or 0.0) for final in self.finals for w in final.words)
        return Answer(" ".join(final.text for final in self.finals), words, 0.0)


async def stream(url: str, recording: Recording, hello: Hello) -> Heard:
    """Stream one clip as if it were spoken now."""
    samples = np.concatenate([recording.samples(), np.zeros(int(SILENCE_BEHIND_S * SAMPLE_RATE_HZ), np.float32)])
    heard = Heard()
    async with connect(url, hello) as client:
        began_s = time.monotonic()
        listening = asyncio.create_task(_listen(client, heard, began_s))
        for at in range(0, len(samples), PACKET_SAMPLES):
            packet = samples[at : at + PACKET_SAMPLES]
            spoken_s = (at + len(packet)) / SAMPLE_RATE_HZ  # a packet exists only once its last sample was spoken
            await asyncio.sleep(began_s + spoken_s - time.monotonic())
            await client.send_audio(packet.astype("<f4").tobytes())
        await client.bye()
        await listening
    return heard


async def _listen(client, heard: Heard, began_s: float) -> None:  # type: ignore[no-untyped-def]  # StreamClient
    voice_end_s: float | None = None
    async for event in client:
        now_s = time.monotonic() - began_s
        match event:
            case Partial() | Final() if event.text and heard.first_text_s is None:
                heard.first_text_s = now_s
        match event:
            case SpeechEnded():
                voice_end_s = event.speech_end_s
            case Final():
                heard.finals.append(event)
                heard.last_final_s = now_s
                if event.reason == "silence" and voice_end_s is not None:
                    heard.from_voice_end_s.append(now_s - voice_end_s)
                    voice_end_s = None


async def stream_all(url: str, recordings: Sequence[Recording], hello_of, n_streams: int) -> dict[str, Heard]:  # type: ignore[no-untyped-def]
    """Every clip, ``n_streams`` at a time."""
    waiting = list(reversed(recordings))
    heard: dict[str, Heard] = {}

    async def one_after_another() -> None:
        while waiting:
            recording = waiting.pop()
            heard[recording.recording_id] = await stream(url, recording, hello_of(recording))
            if len(heard) % 20 == 0:
                print(f"{len(heard)} of {len(recordings)} clips", file=sys.stderr)

    await asyncio.gather(*(one_after_another() for _ in range(n_streams)))
    return heard


def transcribe_all(model: str, recordings: Sequence[Recording]) -> dict[str, Answer]:
    """Every clip offline, whole; non-speech counts as English, since some language has to be named."""
    engine = load_engine(model)
    answers = {}
    for recording in recordings:
        language = "en" if recording.language == "zxx" else recording.language
        began_s = time.process_time()
        segments = list(engine.transcribe(recording.samples(), DecodeOptions(language=language)))  # type: ignore[attr-defined]
        words: tuple[TimedWord, ...] = tuple(
            (w.text, (w.start_sample or 0) / SAMPLE_RATE_HZ, (w.end_sample or 0) / SAMPLE_RATE_HZ)
            for segment in segments
            for w in segment.words
        )
        text = "".join(word for word, _, _ in words)
        answers[recording.recording_id] = Answer(text, words, time.process_time() - began_s)
    return answers


def median_and_p90(values: list[float]) -> str:
    """``median / 90th percentile`` of seconds, and how many."""
    ordered = sorted(values)
    if not ordered:
        return "none"
    return f"{statistics.median(ordered):.2f} / {ordered[int(0.9 * (len(ordered) - 1))]:.2f} s ({len(ordered)})"


def latencies(recordings: Sequence[Recording], heard: dict[str, Heard]) -> tuple[list[float], list[float], list[float]]:
    """From the first word's start to the first text; from the last word's end, and the voice's, to the final."""
    first, final, voice = [], [], []
    for recording in recordings:
        got = heard[recording.recording_id]
        voice += got.from_voice_end_s
        if not recording.words or got.first_text_s is None or got.last_final_s is None:
            continue
        first.append(got.first_text_s - recording.words[0][1])
        final.append(got.last_final_s - recording.words[-1][2])
    return first, final, voice


def table(recordings: Sequence[Recording], heard: dict[str, Heard], offline: dict[str, Answer]) -> list[str]:
    """Error rates by kind, streamed beside offline."""
    streamed_scores = score(recordings, {name: got.answer() for name, got in heard.items()})
    offline_scores = score(recordings, offline)
    lines = ["| kind | clips | words | streamed % | offline % |", "|---|---|---|---|---|"]
    for kind, ours in streamed_scores.items():
        theirs = offline_scores[kind]
        if ours.error_rate is None or theirs.error_rate is None:
            cells = f"{ours.n_clips_with_text} clips with text | {theirs.n_clips_with_text} clips with text"
        else:
            cells = f"{100 * ours.error_rate:.2f} | {100 * theirs.error_rate:.2f}"
        lines.append(f"| {kind} | {ours.n_clips} | {ours.n_reference} | {cells} |")
    return lines


def word_times(recordings: Sequence[Recording], heard: dict[str, Heard]) -> str:
    """How far the streamed words' starts are off."""
    errors = score(recordings, {name: got.answer() for name, got in heard.items()})[ENGLISH].start_errors_s
    off = sorted(abs(error) for error in errors)
    return f"{1000 * statistics.median(off):.0f} ms" if off else "none"


def main() -> None:
    """Stream, transcribe, score."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="whisper-tiny.en")
    parser.add_argument("--streams", type=int, default=1, help="clips at once")
    parser.add_argument("--every", type=int, default=1, help="each n-th clip")
    parser.add_argument("--interval-ms", type=int, default=500, help="least time between partials")
    arguments = parser.parse_args()
    recordings = read_manifest(DEFAULT_MANIFEST, languages=["en"], every=arguments.every)

    def hello_of(recording: Recording) -> Hello:
        language = None if arguments.model.endswith(".en") or recording.language == "zxx" else recording.language
        audio = AudioFormat("f32le", SAMPLE_RATE_HZ)
        return Hello(audio=audio, language=language, partial_interval_ms=arguments.interval_ms)

    with serving(arguments.model) as server:
        cpu_before_s, began_s = server.cpu_s() or 0.0, time.monotonic()
        heard = asyncio.run(stream_all(server.url, recordings, hello_of, arguments.streams))
        cpu_s, wall_s = (server.cpu_s() or 0.0) - cpu_before_s, time.monotonic() - began_s
    first, final, voice = latencies(recordings, heard)
    audio_s = sum(recording.duration_s for recording in recordings)
    lines = [
        heading(f"{arguments.model}, streamed at real time, {arguments.streams} at once"),
        f"{len(recordings)} clips, {audio_s / 60:.1f} minutes; partials every {arguments.interval_ms} ms, "
        "hangover 400 ms.\n",
        f"- first partial after the start of the first word, median / p90: {median_and_p90(first)}",
        f"- final after the end of the last word, hangover included: {median_and_p90(final)}",
        f"- final after the end of the voice as the detector hears it: {median_and_p90(voice)}",
        f"- starts of words off by (median): {word_times(recordings, heard)}",
        f"- server's CPU time for a second of audio: {cpu_s / audio_s:.3f} s; cores busy: {cpu_s / wall_s:.2f}\n",
        *table(recordings, heard, transcribe_all(arguments.model, recordings)),
    ]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
