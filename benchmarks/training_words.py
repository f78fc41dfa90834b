"""When each word of the training recordings is said, by forced alignment with a small acoustic model.

Reads the lists that the training reads and writes one line a recording: its id and its words with start and end in
seconds, or null where a word is in no dictionary or the alignment failed. Needs `pocketsphinx`, whose package has the
model and the dictionary. Knows nothing of the network.

    python -m benchmarks.training_words --data FOLDER [FOLDER ...] --out words.jsonl [--part 0/2]
"""

import argparse
import json
from pathlib import Path
from typing import Any

import soundfile

from models.parakeet.training.data import Utterance, read_list, spoken

FRAMES_PER_S = 100  # of the aligner


def align(decoder: Any, utterance: Utterance) -> list[tuple[str, float, float]] | None:
    """The words of a recording with their times, or None."""
    words = spoken(utterance.text).split()
    if not words or any(decoder.lookup_word(word) is None for word in words):
        return None
    samples, _ = soundfile.read(utterance.path, dtype="int16")
    decoder.set_align_text(" ".join(words))
    decoder.start_utt()
    decoder.process_raw(samples.tobytes(), full_utt=True)
    decoder.end_utt()
    if decoder.hyp() is None:
        return None
    found = [
        (segment.word.partition("(")[0], segment.start_frame / FRAMES_PER_S, (segment.end_frame + 1) / FRAMES_PER_S)
        for segment in decoder.seg()
        if segment.word[0] not in "<[("  # silence and noise
    ]
    return found if [word for word, _, _ in found] == words else None


def main() -> None:
    """Aligns the recordings of some lists, or every n-th of them."""
    from pocketsphinx import Decoder  # for making the data only

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", default="0/1", help="I/N: only every N-th recording, from I")
    args = parser.parse_args()

    first, step = map(int, args.part.split("/"))
    decoder = Decoder(loglevel="FATAL", beam=1e-80, wbeam=1e-60, pbeam=1e-80, lm=None)
    utterances = [utterance for folder in args.data for utterance in read_list(folder / "train.jsonl")]
    with args.out.open("w", encoding="utf-8") as lines:
        for utterance in utterances[first::step]:
            lines.write(json.dumps([utterance.utterance_id, align(decoder, utterance)]) + "\n")


if __name__ == "__main__":
    main()
