"""Every word once: the border between two segments, moved over each clip in steps of 20 ms.

Each clip is one utterance that is too long for one span, so that it is cut wherever the maximum falls: in words,
between words, in the middle of sounds. The finals, joined, are compared with the text of the same clip decoded whole.
Partials are decoded as in a session, since what they settle takes part in the cut. No gate, no clock, no network.
"""

import argparse
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean

import jiwer
import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks.recordings import DEFAULT_MANIFEST, Recording, normalise, read_manifest
from benchmarks.report import RESULTS, heading
from models.catalog import load_engine
from models.store import TWO_CITIES_TEXT, recording
from streaming.engine import Chunk, DecodeOptions, SpeechEngine
from streaming.pacing import Pacing
from streaming.transcript import EndReason, Hypothesis, Segment, text_of
from streaming.utterance import DecodeRequest, Utterance
from vad.audio import SAMPLE_RATE_HZ, samples_from_ms

STEP_SAMPLES = samples_from_ms(20)
UNCUT_SAMPLES = samples_from_ms(30_000)
SEAM_WORDS = 2  # a difference so many words from a seam, or fewer, is the seam's

Decode = Callable[[DecodeRequest], Hypothesis]


@dataclass(frozen=True, slots=True, eq=False)
class Clip:
    """One stretch of speech [n_samples] and what is said in it."""

    recording: Recording
    samples: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Differences:
    """How the joined finals differ from the text of the whole, in words."""

    n_doubled: int = 0  # inserted, and the same as what stands beside it
    n_inserted: int = 0  # the other insertions
    n_lost: int = 0
    n_substituted: int = 0
    n_away: int = 0  # of all these, further than SEAM_WORDS from a seam

    @property
    def is_equal(self) -> bool:
        """No difference at all."""
        return self == Differences()


@dataclass(frozen=True, slots=True)
class Joined:
    """What one border gave."""

    max_span_samples: int
    seams: tuple[str, ...]  # normalised text of each final
    differences: Differences

    @property
    def text(self) -> str:
        """The finals, with their seams."""
        return " ‖ ".join(self.seams)


def memoised_decoder(engine: SpeechEngine, samples: NDArray[np.float32]) -> Decode:
    """Decodes of one clip. What comes before the border is asked for again and again, and answered once."""
    stream = engine.open(DecodeOptions())
    known: dict[tuple[object, ...], Hypothesis] = {}

    def decode(request: DecodeRequest) -> Hypothesis:
        key = (request.span, request.prompt, request.prefix, request.is_final)
        if key not in known:
            chunk = Chunk(
                span=request.span,
                samples=samples[request.span.start_sample : request.span.end_sample],
                is_final=request.is_final,
                prompt=request.prompt,
                prefix=request.prefix,
                left_context_samples=request.left_context_samples,
            )
            [known[key]] = engine.decode([(stream, chunk)])
        return known[key]

    return decode


def finals_of(decode: Decode, n_samples: int, pacing: Pacing) -> list[Segment]:
    """The finals of ``n_samples`` of speech, heard in steps of 20 ms by an engine that takes no time."""
    utterance = Utterance(start_sample=0, segment_ids=itertools.count(1), pacing=pacing)
    segments: list[Segment] = []

    def work() -> None:
        while (request := utterance.next_request()) is not None:
            segments.extend(utterance.decoded(decode(request)))

    for until_sample in range(STEP_SAMPLES, n_samples, STEP_SAMPLES):
        utterance.heard(until_sample)
        work()
    utterance.heard(n_samples)
    segments += utterance.ended(end_sample=n_samples, speech_end_sample=n_samples, reason=EndReason.END)
    work()
    return [segment for segment in segments if segment.end_reason is not None]


def compare(whole: str, seams: Sequence[str]) -> Differences:
    """Count the differences between normalised texts; ``seams`` are the finals, in order."""
    joined = " ".join(part for part in seams if part)
    if not whole or not joined:
        return Differences(n_inserted=len(joined.split()), n_lost=len(whole.split()))
    words = joined.split()
    places = list(itertools.accumulate(len(part.split()) for part in seams))[:-1]
    counts = dict.fromkeys(("doubled", "inserted", "lost", "substituted", "away"), 0)
    for piece in jiwer.process_words(whole, joined).alignments[0]:
        if piece.type == "equal":
            continue
        begin, end = piece.hyp_start_idx, piece.hyp_end_idx
        n_words = max(end - begin, piece.ref_end_idx - piece.ref_start_idx)
        kind = {"insert": "inserted", "delete": "lost", "substitute": "substituted"}[piece.type]
        if kind == "inserted" and words[begin:end] in (words[2 * begin - end : begin], words[end : 2 * end - begin]):
            kind = "doubled"
        counts[kind] += n_words
        if all(place < begin - SEAM_WORDS or place > end + SEAM_WORDS for place in places):
            counts["away"] += n_words
    return Differences(*counts.values())


def sweep(clip: Clip, decode: Decode, borders: Iterable[int], interval_ms: int) -> tuple[str, str, list[Joined]]:
    """The text of the whole by one decode, the same with partials on the way, and the joined text of each border."""
    partial_interval_samples = samples_from_ms(interval_ms)

    def seams_of(pacing: Pacing) -> tuple[str, ...]:
        finals = finals_of(decode, len(clip.samples), pacing)
        return tuple(normalise(text_of(final.words), clip.recording) for final in finals)

    [whole] = seams_of(Pacing(first_partial_samples=UNCUT_SAMPLES, max_span_samples=UNCUT_SAMPLES))
    [streamed] = seams_of(Pacing(partial_interval_samples=partial_interval_samples, max_span_samples=UNCUT_SAMPLES))
    joined = []
    for border in borders:
        seams = seams_of(Pacing(partial_interval_samples=partial_interval_samples, max_span_samples=border))
        joined.append(Joined(border, seams, compare(whole, seams)))
    return whole, streamed, joined


def borders_of(n_samples: int, n_borders: int) -> range:
    """Maxima around the middle, each 20 ms from the next."""
    first = n_samples // 2 - n_borders // 2 * STEP_SAMPLES
    return range(first, first + n_borders * STEP_SAMPLES, STEP_SAMPLES)


def clips_of(n_clips: int) -> list[Clip]:
    """The opening of *A Tale of Two Cities* from the wheel, and clips of 6 s or more from the manifest."""
    audio, rate_hz = soundfile.read(recording("two_cities"), dtype="float32")
    samples = soxr.resample(audio, rate_hz, SAMPLE_RATE_HZ)[: samples_from_ms(13_000)]
    text = TWO_CITIES_TEXT[: TWO_CITIES_TEXT.index(" it was the season of Light")]
    two_cities = Recording("two_cities, first 13 s", recording("two_cities"), "read-misc", "en", text, 13.0, ())
    found = read_manifest(DEFAULT_MANIFEST, languages=["en"]) if n_clips else []
    long = [item for item in found if item.kind in ("read-clean", "read-aligned") and 6 <= item.duration_s <= 11]
    chosen = long[:: max(len(long) // max(n_clips, 1), 1)][:n_clips]
    return [Clip(two_cities, samples), *(Clip(item, item.samples()) for item in chosen)]


HEAD = (
    "| clip | borders | equal to the whole | doubled | inserted | lost | substituted | of these away from the seam "
    "| word errors: whole / uncut with partials / joined |\n|---|---|---|---|---|---|---|---|---|"
)


def row(name: str, joined: Sequence[Joined], errors: tuple[float, float, float]) -> str:
    """One line of the table; errors are a mean over the borders."""
    found = [item.differences for item in joined]
    cells = [
        name,
        str(len(joined)),
        f"{100 * mean(item.is_equal for item in found):.0f} %",
        *(
            str(sum(getattr(item, name) for item in found))
            for name in ("n_doubled", "n_inserted", "n_lost", "n_substituted", "n_away")
        ),
        f"{errors[0]:.1f} / {errors[1]:.1f} / {errors[2]:.1f}",
    ]
    return "| " + " | ".join(cells) + " |"


def word_errors(reference: str, text: str) -> int:
    """Substitutions, deletions and insertions."""
    compared = jiwer.process_words(reference, text)
    return int(compared.substitutions + compared.deletions + compared.insertions)


def main() -> None:
    """Sweep the border over every clip."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="whisper-tiny.en")
    parser.add_argument("--clips", type=int, default=10, help="from the manifest, beside two_cities")
    parser.add_argument("--borders", type=int, default=51, help="20 ms apart, around the middle of each clip")
    parser.add_argument("--interval-ms", type=int, default=2_000, help="audio between partials")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--examples", type=int, default=3, help="kinds of difference shown for each clip")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/borders.md")
    arguments = parser.parse_args()
    engine = load_engine(arguments.model, n_threads=arguments.threads)
    rows, everything, totals = [], [], np.zeros(3)
    examples: list[str] = []
    for clip in tqdm(clips_of(arguments.clips), unit="clip"):
        borders = borders_of(len(clip.samples), arguments.borders)
        whole, streamed, joined = sweep(
            clip, memoised_decoder(engine, clip.samples), borders, interval_ms=arguments.interval_ms
        )
        reference = normalise(clip.recording.transcript, clip.recording)
        errors = (
            float(word_errors(reference, whole)),
            float(word_errors(reference, streamed)),
            mean(word_errors(reference, " ".join(item.seams)) for item in joined),
        )
        totals += errors
        everything += joined
        rows.append(row(clip.recording.recording_id, joined, errors))
        examples += examples_of(whole, joined, arguments.examples)
    rows.append(row("**all**", everything, (float(totals[0]), float(totals[1]), float(totals[2]))))
    text = "\n".join(
        [
            heading("Every word once: segments joined at any border"),
            f"{arguments.model}, a partial every {arguments.interval_ms} ms, segments cut at a maximum span that is "
            f"moved in steps of 20 ms over {arguments.borders * 20 - 20} ms around the middle of each clip; texts are "
            "compared after Whisper's normaliser. Counts are words over all borders; a doubled word equals the one "
            "beside it.\n",
            HEAD,
            *rows,
            "\n## The worst of each clip, with the borders of the segments (‖)\n",
            *examples,
        ]
    )
    print(text)
    if arguments.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "borders.md").write_text(text + "\n", encoding="utf-8")


def examples_of(whole: str, joined: Sequence[Joined], n_examples: int) -> list[str]:
    """The worst kinds of difference in one clip."""
    kinds: dict[tuple[str, ...], list[Joined]] = {}
    for item in joined:
        if not item.differences.is_equal:
            kinds.setdefault(item.seams, []).append(item)
    worst = sorted(kinds.values(), key=lambda items: -_weight(items[0].differences))[:n_examples]
    return [f"- whole: {whole}", *map(_example, worst)] if worst else []


def _weight(differences: Differences) -> int:
    return 4 * differences.n_doubled + 2 * (differences.n_lost + differences.n_inserted) + differences.n_substituted


def _example(items: Sequence[Joined]) -> str:
    at_s = items[0].max_span_samples / SAMPLE_RATE_HZ
    return f"  - joined, at {len(items)} borders from {at_s:.2f} s on: {items[0].text}"


if __name__ == "__main__":
    main()
