"""How much silence a short Whisper window needs: error rate and CPU time by padding, tail and timestamps.

Run from the project's root, one line a setting:

    python -m benchmarks.whisper_padding --model whisper-tiny.en --every 2 full:0:on 0.5:0:off 0.5:8:off

A setting is SECONDS:STRIDE:TIMESTAMPS. SECONDS of silence follow the speech in the encoder (``full``: up to 30 s);
STRIDE thins out the remembered silence that attention sees behind that (0: none). Clips of up to 30 s, temperature 0,
no fallback, one thread.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.recordings import DEFAULT_MANIFEST, ENGLISH, Answer, Recording, read_manifest, score
from models.mel import HOP_SAMPLES, WINDOW_S, log_mel
from models.store import find_model
from models.tokenizer import WhisperTokenizer
from models.whisper.cpu import pack
from models.whisper.decode import Request, decode, is_silent, max_sampled_tokens
from models.whisper.loading import read_model
from models.whisper.reference import SilentTail
from models.whisper.vocabulary import rule_book
from models.whisper.window import LOUDEST_FEATURE, QUIETEST_FEATURE
from vad.audio import SAMPLE_RATE_HZ

POSITION_SAMPLES = 2 * HOP_SAMPLES


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table."""

    padding_s: float  # at most what is left of 30 s
    tail_stride: int
    with_timestamps: bool

    @staticmethod
    def parse(text: str) -> "Setting":
        """From SECONDS:STRIDE:on|off."""
        padding, stride, timestamps = text.split(":")
        return Setting(float(WINDOW_S) if padding == "full" else float(padding), int(stride), timestamps == "on")


class Bench:
    """One model, decoding clips under any setting."""

    def __init__(self, name: str) -> None:
        torch.set_num_threads(1)
        files = find_model(name)
        self.model = read_model(files).eval()
        pack(self.model)
        self.tokenizer = WhisperTokenizer.load(files.tokenizer)
        self.rules = rule_book(self.tokenizer, self.model.config.n_vocab)
        self.special = self.rules.special
        self.silence = torch.full(
            (1, self.model.config.n_mels, 2 * self.model.config.n_audio_positions), QUIETEST_FEATURE
        )

    def tail(self, stride: int) -> SilentTail | None:
        """The remembered silence, thinned out."""
        return self.model.silent_tail(self.silence, stride=stride) if stride else None

    def answer(self, recording: Recording, setting: Setting, tail: SilentTail | None) -> tuple[Answer, bool]:
        """The text, and whether the decoder came to an end by itself."""
        samples = recording.samples()
        began_s = time.process_time()
        n_padding = round(setting.padding_s * SAMPLE_RATE_HZ)
        n_positions = min(-(-(len(samples) + n_padding) // POSITION_SAMPLES), self.model.config.n_audio_positions)
        features = log_mel(samples, self.model.config.n_mels, 2 * n_positions)
        features += LOUDEST_FEATURE - features.max()
        cache = self.model.decoder.open_cache(self.model.encoder(features[None], tail), tail)
        language = self.special.languages[:1]  # English is the first
        head = [self.special.start_of_transcript, *((*language, self.special.transcribe) if language else ())]
        rules = self.rules.timed if setting.with_timestamps else self.rules.plain
        if not setting.with_timestamps:
            head.append(self.special.no_timestamps)
        decoded = decode(self.model, cache, Request(tuple(head), 0, (), (), max_sampled_tokens(len(samples))), rules)
        text = "" if is_silent(decoded) else self.tokenizer.decode(decoded.tokens)
        return Answer(text, (), time.process_time() - began_s), decoded.has_ended


def measure(bench: Bench, recordings: Sequence[Recording], setting: Setting) -> str:
    """One row of the table."""
    tail = bench.tail(setting.tail_stride)
    answers, n_cut = {}, 0
    for recording in recordings:
        answers[recording.recording_id], has_ended = bench.answer(recording, setting, tail)
        n_cut += not has_ended
    scores = score(recordings, answers)
    english, silent = scores[ENGLISH], scores.get("nonspeech")
    padding = "to 30 s" if setting.padding_s == WINDOW_S else f"{setting.padding_s:g} s"
    cells = (
        padding,
        setting.tail_stride or "none",
        "on" if setting.with_timestamps else "off",
        f"{100 * (english.error_rate or 0):.2f} %",
        english.n_substituted,
        english.n_deleted,
        english.n_inserted,
        n_cut,
        f"{silent.n_clips_with_text}/{silent.n_clips}" if silent else "-",
        f"{english.cpu_per_audio_s:.4f}",
    )
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


HEADER = (
    "| silence encoded | tail stride | timestamps | WER | sub | del | ins | never ended | non-speech with text "
    "| CPU s / s |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="whisper-tiny.en")
    parser.add_argument("--manifest", type=Path, default=DEFAULT_MANIFEST)
    parser.add_argument("--every", type=int, default=1, help="take every n-th clip")
    parser.add_argument("settings", nargs="+", type=Setting.parse)
    arguments = parser.parse_args()
    recordings = [
        recording
        for recording in read_manifest(arguments.manifest, languages=("en",), every=arguments.every)
        if recording.duration_s <= WINDOW_S
    ]
    n_words = sum(len(recording.transcript.split()) for recording in recordings)
    print(f"{arguments.model}, {len(recordings)} clips, about {n_words} words\n\n{HEADER}")
    with torch.inference_mode():
        bench = Bench(arguments.model)
        for setting in arguments.settings:
            print(measure(bench, recordings, setting), flush=True)


if __name__ == "__main__":
    main()
