"""What the small Parakeet mishears: recordings in one piece, by kind, and speakers that it was never trained on.

Run from the project's root; needs ``../shared/audio`` and ``../shared/train`` beside the checkout:

    python -m benchmarks.parakeet_tiny

Of the kinds in ``../shared/audio`` the read speech and the digits are mostly by speakers of the training list, in
sentences that are not in it; the single digits that are joined there are. Only the held-out speakers tell how strangers
fare.
"""

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.recordings import DEFAULT_MANIFEST, Answer, Recording, Score, read_manifest, score_one
from models.catalog import load_engine
from models.parakeet.engine import ParakeetEngine
from models.parakeet.training.data import SPLIT_SEED, Utterance, decode, held_out_speakers, read_list
from streaming.engine import DecodeOptions
from streaming.transcript import text_of
from vad.audio import SAMPLE_RATE_HZ, seconds

DEFAULT_LIST = Path(__file__).parents[2] / "shared" / "train" / "train.jsonl"
N_IN_A_ROW = 5
GAP_S = 0.12  # between digits in a row
KINDS = ("digits", "alphanumeric", "commands", "read-clean", "read-aligned", "read-misc", "long-form", "nonspeech")

Clip = tuple[str, Recording, NDArray[np.float32]]  # row of the table, what was said, samples [n]


def hear(engine: ParakeetEngine, samples: NDArray[np.float32]) -> Answer:
    """A recording's words and the CPU time of hearing them."""
    began_s = time.process_time()
    words = [word for part in engine.transcribe(samples, DecodeOptions()) for word in part.words]
    cpu_s = time.process_time() - began_s
    timed = tuple((word.text, seconds(word.start_sample or 0), seconds(word.end_sample or 0)) for word in words)
    return Answer(text_of(words), timed, cpu_s)


def held_out(path: Path) -> Iterator[Clip]:
    """What the speakers say whom the training leaves out: sentences, digits one by one, and digits in a row."""
    utterances = read_list(path)
    speakers = held_out_speakers(utterances, seed=SPLIT_SEED)
    digits: dict[str, list[Utterance]] = defaultdict(list)
    for utterance in utterances:
        if utterance.speaker in speakers:
            is_digit = len(utterance.text.split()) == 1 and utterance.duration_s < 1.2
            where = f"held out: {'single digits' if is_digit else 'sentences'} by {utterance.speaker}"
            yield _clip(where, utterance.utterance_id, utterance.text, decode(utterance.path))
            if is_digit:
                digits[utterance.speaker].append(utterance)
    for speaker, takes in digits.items():
        random.Random(SPLIT_SEED).shuffle(takes)
        for start in range(0, len(takes) - N_IN_A_ROW + 1, N_IN_A_ROW):
            row = takes[start : start + N_IN_A_ROW]
            gap = np.zeros(int(GAP_S * SAMPLE_RATE_HZ), np.float32)
            samples = np.concatenate([part for take in row for part in (gap, decode(take.path))] + [gap])
            text = " ".join(take.text for take in row)
            yield _clip(f"held out: digits in a row by {speaker}", f"{speaker}-{start}", text, samples)


def _clip(where: str, clip_id: str, text: str, samples: NDArray[np.float32]) -> Clip:
    kind = "digits" if "digit" in where else "held-out"
    return where, Recording(clip_id, Path(), kind, "en", text, len(samples) / SAMPLE_RATE_HZ, ()), samples


def clips(manifest: Path, training_list: Path) -> Iterator[Clip]:
    """The recordings of the manifest that suit so small a model, and the held-out speakers."""
    for recording in read_manifest(manifest, languages=("en",)):
        if recording.kind in KINDS:
            yield recording.kind, recording, recording.samples()
    yield from held_out(training_list)


def row(kind: str, total: Score) -> str:
    """A line of the table."""
    if total.error_rate is None:
        errors = f"{total.n_clips_with_text}/{total.n_clips} clips, {total.n_inserted} words"
    else:
        parts = f"{total.n_substituted}/{total.n_deleted}/{total.n_inserted}"
        errors = f"{100 * total.error_rate:.1f} % ({parts})"
    return f"| {kind} | {total.n_clips} | {total.n_reference} | {errors} | {total.cpu_per_audio_s:.3f} |"


def main() -> None:
    """Print the table, and what was heard with ``--show``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="parakeet-tiny")
    parser.add_argument("--manifest", type=Path, default=DEFAULT_MANIFEST)
    parser.add_argument("--list", type=Path, default=DEFAULT_LIST)
    parser.add_argument("--every", type=int, default=1, help="take every n-th clip")
    parser.add_argument("--show", action="store_true", help="print each text beside what was said")
    arguments = parser.parse_args()
    engine = load_engine(arguments.model, n_threads=1)
    assert isinstance(engine, ParakeetEngine)
    totals: dict[str, Score] = defaultdict(Score)
    for index, (where, recording, samples) in enumerate(clips(arguments.manifest, arguments.list)):
        if index % arguments.every == 0:
            answer = hear(engine, samples)
            totals[where].add(score_one(recording, answer))
            if arguments.show:
                print(f"{where}: {recording.transcript.lower()} | {answer.text}")
    print("| kind | clips | words | errors (sub/del/ins) | CPU s/s |\n|---|---|---|---|---|")
    for kind, total in totals.items():
        print(row(kind, total))


if __name__ == "__main__":
    main()
