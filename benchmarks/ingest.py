"""Delay and cost of resampling, and which misread audio is noticed, on recordings.

Run from the project's root; prints Markdown:

    python -m benchmarks.ingest > benchmarks/results/ingest.md
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from benchmarks.report import heading
from gateway.ingest import AudioFormat, Ingest, suspect
from gateway.pcm import decode
from gateway.resample import Resampler
from vad.audio import SAMPLE_RATE_HZ

DEFAULT_MANIFEST = Path(__file__).parents[2] / "shared" / "audio" / "manifest.jsonl"
RATES_HZ = (8_000, 11_025, 22_050, 24_000, 32_000, 44_100, 48_000, 12_345, 8_001)
ENCODINGS = ("s16le", "s24le", "s32le", "f32le", "mulaw", "alaw")
LISTENED_S = 2
PACKETS_PER_S = 50


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--manifest", type=Path, default=DEFAULT_MANIFEST)
    arguments = parser.parse_args()
    print(heading("Raw audio on its way in"))
    print(f"soxr {soxr.__version__}.\n")
    _print_resampling()
    _print_suspicion(arguments.manifest)


def _print_resampling() -> None:
    print("## Resampling to 16 kHz in packets of 20 ms\n")
    print("Held back: the most audio that had gone in and not come out behind a packet, after the first second. Seams:")
    print(
        "the difference from soxr HQ over the whole signal, against the signal, of white noise. The filter of a usual"
    )
    print("rate is made once in the life of a process.\n")
    heads = ("rate", "held back, ms", "soxr HQ stream, ms", "CPU µs a packet", "soxr HQ stream, µs", "seams, dB")
    _print_row(*heads, "once, ms")
    _print_row(*["---"] * 7)
    for rate_hz in RATES_HZ:
        started_s = time.process_time()
        Resampler(rate_hz).push(np.zeros(rate_hz // 10, np.float32))
        once_ms = (time.process_time() - started_s) * 1e3
        ours = _stream(rate_hz, Resampler(rate_hz).push)
        theirs = _stream(rate_hz, soxr.ResampleStream(rate_hz, SAMPLE_RATE_HZ, 1, dtype="float32").resample_chunk)
        delays_ms, costs_us = (f"{ours[0]:.1f}", f"{theirs[0]:.1f}"), (f"{ours[1]:.0f}", f"{theirs[1]:.0f}")
        _print_row(rate_hz, *delays_ms, *costs_us, f"{_seams_db(rate_hz):.0f}", f"{once_ms:.0f}")


def _stream(rate_hz: int, push: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> tuple[float, float]:
    """The most that was held back, in ms, and the CPU time of a packet, in µs."""
    n_packets = 20 * PACKETS_PER_S
    packet = (0.1 * np.random.default_rng(0).normal(size=rate_hz // PACKETS_PER_S)).astype(np.float32)
    n_out, held_back_s = 0, 0.0
    started_s = time.process_time()
    for index in range(1, n_packets + 1):
        n_out += len(push(packet))
        if index > PACKETS_PER_S:
            held_back_s = max(held_back_s, index * len(packet) / rate_hz - n_out / SAMPLE_RATE_HZ)
    return held_back_s * 1e3, (time.process_time() - started_s) / n_packets * 1e6


def _seams_db(rate_hz: int) -> float:
    """What blocks differ from one piece, as a share of the power, both ends left out."""
    samples = (0.1 * np.random.default_rng(0).normal(size=4 * rate_hz)).astype(np.float32)
    in_one_piece = soxr.resample(samples, rate_hz, SAMPLE_RATE_HZ, quality="HQ")
    in_blocks = Resampler(rate_hz).push(samples)
    inner = slice(SAMPLE_RATE_HZ // 10, 3 * SAMPLE_RATE_HZ)
    difference = in_blocks[inner] - in_one_piece[inner]
    return float(10 * np.log10(np.mean(difference**2) / np.mean(in_one_piece[inner] ** 2)))


def _print_suspicion(manifest: Path) -> None:
    print("\n## Misread audio that is noticed\n")
    clips = _clips(manifest)
    print(
        f"The first {LISTENED_S} s of {len(clips)} recordings (speech, noise, music, tones), written in the encoding of"
    )
    print("the row and read as that of the column; the diagonal is what would be a false alarm.\n")
    codes = {encoding: _codes_of(encoding) for encoding in ("mulaw", "alaw")}
    written: dict[str, Callable[[NDArray[np.float32]], bytes]] = {
        "s16le": lambda x: _integers(x, 16),
        "s16le from its second byte on": lambda x: _integers(x, 16)[1:],
        "s16be": lambda x: np.frombuffer(_integers(x, 16), dtype="<i2").byteswap().tobytes(),
        "s24le": lambda x: np.frombuffer(_integers(x, 24), dtype=np.uint8).reshape(-1, 4)[:, :3].tobytes(),
        "s32le": lambda x: _integers(x, 32),
        "f32le": lambda x: x.astype("<f4").tobytes(),
        "f32le on the scale of 16 bits": lambda x: (x * 32_768).astype("<f4").tobytes(),
        "mulaw": lambda x: codes["mulaw"](x),
        "alaw": lambda x: codes["alaw"](x),
        "s16le, two equal channels": lambda x: _integers(np.repeat(x, 2), 16),
    }
    _print_row("written as", *ENCODINGS)
    _print_row(*["---"] * (1 + len(ENCODINGS)))
    for name, write in written.items():
        noticed = [
            np.mean([_is_suspected(write(samples), encoding, rate_hz) for samples, rate_hz in clips])
            for encoding in ENCODINGS
        ]
        _print_row(name, *(f"{share:.0%}" for share in noticed))
    segments = [segment for samples, rate_hz in clips for segment in _segments(_integers(samples, 16), rate_hz)]
    n_alarms = sum(suspect(segment) is not None for segment in segments)
    print(f"\nFalse alarms in {len(segments)} stretches of {LISTENED_S} s, not only the first: {n_alarms}.")
    print("\nNot noticed at all: a wrong sample rate; two channels read as one at rates other than 16 kHz.")


def _clips(manifest: Path) -> list[tuple[NDArray[np.float32], int]]:
    rows = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines()]
    clips = []
    for row in rows:
        if row["kind"] != "formats" and row["channels"] == 1 and row["duration_s"] >= LISTENED_S:
            # Wider samples than read make fewer seconds, so there is twice the audio that will be listened to.
            samples, rate_hz = soundfile.read(
                manifest.parent / row["file"], dtype="float32", frames=4 * LISTENED_S * row["sample_rate"]
            )
            clips.append((samples, rate_hz))
    return clips


def _segments(data: bytes, rate_hz: int) -> list[NDArray[np.float32]]:
    samples = Ingest(AudioFormat("s16le", rate_hz)).push(data).samples
    n_samples = LISTENED_S * SAMPLE_RATE_HZ
    return [samples[start : start + n_samples] for start in range(0, len(samples), n_samples // 4)]


def _is_suspected(data: bytes, encoding: str, rate_hz: int) -> bool:
    ingest = Ingest(AudioFormat(encoding, rate_hz))
    return suspect(ingest.push(data).samples[: LISTENED_S * SAMPLE_RATE_HZ]) is not None


def _integers(samples: NDArray[np.float32], n_bits: int) -> bytes:
    full_scale = 2.0 ** (n_bits - 1)
    scaled = np.clip(np.round(samples.astype(np.float64) * full_scale), -full_scale, full_scale - 1)
    return bytes(scaled.astype("<i2" if n_bits == 16 else "<i4").tobytes())


def _codes_of(encoding: str) -> Callable[[NDArray[np.float32]], bytes]:
    """Nearest codes of a G.711 table."""
    table = decode(bytes(range(256)), AudioFormat(encoding, 8_000)).samples
    order = np.argsort(table, kind="stable")
    edges = (table[order][1:] + table[order][:-1]) / 2
    return lambda samples: order[np.searchsorted(edges, samples)].astype(np.uint8).tobytes()


def _print_row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()
