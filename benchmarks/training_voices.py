"""Books and requests read aloud by the small voices of flite, for training: many hours within a minute of many cores.

Knows flite's C interface (its voices are shared libraries) and writes recordings and a list in the layout that
`data.py` reads. The voices buzz, so that what they say is worth less than a person's speech; but they say words that
no recording has. Knows nothing of the network.

    python -m benchmarks.training_voices --libraries FOLDER --texts sentences.txt --out FOLDER --hours 12
"""

import argparse
import ctypes
import json
import os
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray

from benchmarks.training_speech import request
from models.parakeet.training.data import SAMPLE_RATE_HZ, spoken

VOICES = ("rms", "slt", "awb")  # a man and a woman from the US, a man from Scotland
SHARE_OF_REQUESTS = 0.3
DEPENDENCIES = ("libasound.so.2", "libflite.so.1", "libflite_usenglish.so.1", "libflite_cmulex.so.1")
GAIN = 0.5


class Wave(ctypes.Structure):
    """`cst_wave` of flite."""

    _fields_ = (
        ("type", ctypes.c_char_p),
        ("sample_rate", ctypes.c_int),
        ("num_samples", ctypes.c_int),
        ("num_channels", ctypes.c_int),
        ("samples", ctypes.POINTER(ctypes.c_short)),
    )


class Voices:
    """flite with its voices, in this process."""

    def __init__(self, libraries: Path) -> None:
        for name in DEPENDENCIES:
            library = ctypes.CDLL(str(libraries / name), mode=ctypes.RTLD_GLOBAL)
            if name == "libflite.so.1":
                self._flite = library
        self._flite.flite_text_to_wave.restype = ctypes.POINTER(Wave)
        self._flite.flite_text_to_wave.argtypes = (ctypes.c_char_p, ctypes.c_void_p)
        self._flite.delete_wave.argtypes = (ctypes.POINTER(Wave),)
        self._flite.flite_feat_set_float.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_float)
        self._flite.flite_init()
        self._voices: dict[str, int] = {}
        for name in VOICES:
            register = getattr(ctypes.CDLL(str(libraries / f"libflite_cmu_us_{name}.so.1")), f"register_cmu_us_{name}")
            register.restype, register.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
            self._voices[name] = register(None)

    def read(self, text: str, voice: str, *, slowness: float, pitch: float) -> NDArray[np.float32]:
        """The text as 16 kHz audio [n] in [-1, 1], so many times as long and as high as the voice's own."""
        features = ctypes.c_void_p.from_address(self._voices[voice] + ctypes.sizeof(ctypes.c_void_p))  # cst_voice
        self._flite.flite_feat_set_float(features, b"duration_stretch", slowness)
        self._flite.flite_feat_set_float(features, b"f0_shift", pitch)
        wave = self._flite.flite_text_to_wave(text.encode("ascii", "ignore"), self._voices[voice])
        if wave.contents.sample_rate != SAMPLE_RATE_HZ:
            raise ValueError(f"{voice} speaks at {wave.contents.sample_rate} Hz; {SAMPLE_RATE_HZ} are needed")
        samples = np.ctypeslib.as_array(wave.contents.samples, (wave.contents.num_samples,)).astype(np.float32)
        self._flite.delete_wave(wave)
        return samples * np.float32(GAIN / 32768)


def texts(sentences: Sequence[str], rng: random.Random) -> Iterator[str]:
    """Without end: sentences and requests."""
    while True:
        yield request(rng) if rng.random() < SHARE_OF_REQUESTS else rng.choice(sentences)


def read_part(part: int, *, libraries: Path, sentences: Sequence[str], out: Path, hours: float, seed: int) -> list[str]:
    """Reads ``hours`` of one process's texts aloud; returns lines of the list."""
    os.nice(5)
    rng = random.Random(seed + part)
    voices = Voices(libraries)
    lines: list[str] = []
    read_s = 0.0
    for index, text in enumerate(texts(sentences, rng)):
        voice = rng.choice(VOICES)
        samples = voices.read(text, voice, slowness=rng.uniform(0.75, 1.25), pitch=rng.uniform(0.8, 1.25))
        name = f"flite-{part}-{index}"
        soundfile.write(out / f"audio/{name}.wav", samples, SAMPLE_RATE_HZ, subtype="PCM_16")
        duration_s = len(samples) / SAMPLE_RATE_HZ
        row = {"id": name, "file": f"audio/{name}.wav", "duration_s": duration_s, "text": spoken(text)}
        lines.append(json.dumps(row | {"speaker": f"flite-{voice}"}))
        read_s += duration_s
        if read_s > 3600 * hours:
            return lines
    raise AssertionError("texts end never")


def main() -> None:
    """Reads aloud into a folder: `audio/*.wav`, and `train.jsonl` once all is there."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--libraries", type=Path, required=True, help="a folder with flite's shared libraries")
    parser.add_argument("--texts", type=Path, required=True, help="a sentence a line")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hours", type=float, default=12.0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=4)
    args = parser.parse_args()
    (args.out / "audio").mkdir(parents=True, exist_ok=True)
    sentences = args.texts.read_text(encoding="utf-8").splitlines()
    each = partial(
        read_part,
        libraries=args.libraries,
        sentences=sentences,
        out=args.out,
        hours=args.hours / args.processes,
        seed=args.seed,
    )
    with ProcessPoolExecutor(args.processes) as pool:
        lines = [line for part in pool.map(each, range(args.processes)) for line in part]
    part_file = args.out / "train.jsonl.part"
    part_file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    part_file.rename(args.out / "train.jsonl")


if __name__ == "__main__":
    main()
