"""Sentences for training, read aloud by a text-to-speech voice.

Knows what short spoken requests look like (digits, numbers, times, commands), writes recordings and a list in the
layout that `data.py` reads, and needs `piper-tts` and a voice package. Knows nothing of the network.

    python -m benchmarks.training_speech --voice VOICE.onnx --texts train.jsonl --out FOLDER --n-sentences 900
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr

from models.parakeet.training.data import SPLIT_SEED, held_out_speakers, read_list, spoken

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEENS = ("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
THINGS = ("lights", "music", "radio", "heating", "television", "alarm", "fan", "door", "window", "kettle", "oven")
ROOMS = ("kitchen", "bedroom", "bathroom", "hall", "garden", "office", "garage", "living room")
PEOPLE = ("anna", "robert", "my mother", "the doctor", "the office", "james", "mary", "my brother", "the school")
DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday", "today", "tomorrow")
PLACES = ("the station", "the airport", "the nearest bank", "london", "boston", "chicago", "the library", "the market")
SHARE_OF_TEXTS = 0.45  # of the sentences, how many are read from the list of transcripts
SAMPLE_RATE_HZ = 16_000


def number(n: int) -> str:
    """A whole number below a thousand in words, without "and"."""
    if n >= 100:
        rest = f" {number(n % 100)}" if n % 100 else ""
        return f"{DIGITS[n // 100]} hundred{rest}"
    if n >= 20:
        return TENS[n // 10 - 2] + (f" {DIGITS[n % 10]}" if n % 10 else "")
    return TEENS[n - 10] if n >= 10 else DIGITS[n]


def request(rng: random.Random) -> str:
    """A short request as people make it of a voice agent, drawn at random."""
    n, hour = number(rng.randrange(1, 100)), number(rng.randrange(1, 13))
    forms = (
        " ".join(rng.choice(DIGITS) for _ in range(rng.randrange(3, 9))),
        " ".join(rng.choice(DIGITS) for _ in range(rng.randrange(3, 9))),
        f"turn {rng.choice(('on', 'off'))} the {rng.choice(THINGS)} in the {rng.choice(ROOMS)}",
        f"set {rng.choice(('a timer', 'an alarm'))} for {n} {rng.choice(('minutes', 'seconds', 'hours'))}",
        f"call {rng.choice(PEOPLE)} {rng.choice(('now', 'again', 'at home', 'on ' + rng.choice(DAYS)))}",
        f"what is the weather like {rng.choice(('in ' + rng.choice(PLACES), 'on ' + rng.choice(DAYS)))}",
        f"how far is it to {rng.choice(PLACES)}",
        f"i would like {n} of them please",
        f"my number is {' '.join(rng.choice(DIGITS) for _ in range(7))}",
        f"it costs {number(rng.randrange(1, 1000))} dollars",
        f"remind me at {hour} {rng.choice(('thirty', 'fifteen', 'o clock'))} on {rng.choice(DAYS)}",
        f"{rng.choice(('open', 'close', 'lock'))} the {rng.choice(('door', 'window'))} in the {rng.choice(ROOMS)}",
        rng.choice(("yes", "no", "yes please", "no thank you", "stop", "go back", "cancel", "repeat that please")),
    )
    return rng.choice(forms)


def sentences(texts: list[str], *, n_sentences: int, seed: int) -> list[str]:
    """What is to be read: requests and transcripts mixed, so that the list may be cut anywhere."""
    rng = random.Random(seed)
    texts = rng.sample(texts, len(texts))
    return [texts.pop() if texts and rng.random() < SHARE_OF_TEXTS else request(rng) for _ in range(n_sentences)]


def read_aloud(voice: Any, text: str, rng: random.Random) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The text as 16 kHz audio in [-1, 1]; tempo and intonation are drawn at random."""
    from piper import SynthesisConfig  # a package for making the data only

    config = SynthesisConfig(
        length_scale=rng.uniform(0.8, 1.25), noise_scale=rng.uniform(0.4, 1.0), noise_w_scale=rng.uniform(0.5, 1.1)
    )
    chunks = list(voice.synthesize(text, syn_config=config))
    samples = np.concatenate([chunk.audio_float_array for chunk in chunks])
    return np.asarray(soxr.resample(samples, chunks[0].sample_rate, SAMPLE_RATE_HZ), dtype=np.float32)


def main() -> None:
    """Reads sentences aloud into a folder: `audio/*.opus` and `train.jsonl`, a line at a time."""
    from piper import PiperVoice

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--voice", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True, help="a list whose transcripts are read too")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--n-sentences", type=int, default=900)
    parser.add_argument("--seed", type=int, default=4)
    args = parser.parse_args()

    voice = PiperVoice.load(args.voice)
    rng = random.Random(args.seed)
    listed = read_list(args.texts)
    held_out = held_out_speakers(listed, seed=SPLIT_SEED)  # what they say must stay unknown too
    texts = [text for u in listed if u.speaker not in held_out and len(text := spoken(u.text)) < 120]
    (args.out / "audio").mkdir(parents=True, exist_ok=True)
    with (args.out / "train.jsonl").open("w", encoding="utf-8") as lines:
        for index, text in enumerate(sentences(texts, n_sentences=args.n_sentences, seed=args.seed)):
            samples = read_aloud(voice, text, rng)
            file = f"audio/tts-{index:05d}.opus"
            soundfile.write(args.out / file, samples, SAMPLE_RATE_HZ, format="OGG", subtype="OPUS")
            row = {"id": f"tts-{index:05d}", "file": file, "duration_s": len(samples) / SAMPLE_RATE_HZ, "text": text}
            lines.write(json.dumps(row | {"speaker": f"tts-{args.voice.stem}"}) + "\n")
            lines.flush()


if __name__ == "__main__":
    main()
