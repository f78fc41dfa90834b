"""Do the backends of this machine write the tokens of the float32 reference, and where they don't, how close was it.

Run from the project's root:

    python -m benchmarks.parity --models whisper-tiny.en whisper-base

Greedy decoding of every clip's windows of up to 30 s, no fallback. The reference checks the backend's text as a draft,
which can't change what it writes and spares it most passes; the backend has no draft. A difference is one of rounding
if the reference's two tokens lie closer together than torch's own bfloat16 moves them against each other somewhere up
to there in this window, or than one step of bfloat16 at their size. The table's second line of a model is torch's own
bfloat16, measured the same way. Behind its first difference a text goes its own way, so it is compared up to there.
Clips are all files below the folder that ``--recordings`` names, else those of SENSEWAY_CLIPS (benchmarks/clips.py),
else the two recordings of the models' cache.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.clips import Clip, known_clips, recordings_in
from benchmarks.report import heading
from models.backends import Backends
from models.devices import TORCH_CPU
from models.store import find_model
from models.timeline import Timeline
from models.tokenizer import WhisperTokenizer
from models.whisper.backend import Audio, Backend, Writing
from models.whisper.decode import Request, RuleBook, max_sampled_tokens
from models.whisper.loading import offers, read_model
from models.whisper.reference import DecoderCache, Whisper
from models.whisper.torch_backend import TorchBackend
from models.whisper.vocabulary import rule_book
from models.whisper.window import WINDOW_SAMPLES

REPORT_WINDOWS = 50
MIN_WINDOW_SAMPLES = 1_600


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token that the backend did not write as the reference did."""

    clip: str
    index: int
    wanted: int
    found: int
    gap: float  # of the two tokens' logits in the reference
    rounding: float  # what bfloat16 may account for

    @property
    def is_rounding(self) -> bool:
        """Whether it may come from rounding."""
        return self.gap <= self.rounding


@dataclass(frozen=True, slots=True)
class Compared:
    """One window."""

    n_tokens: int  # of the reference
    n_equal: int
    difference: Difference | None
    logprob_errors: tuple[float, ...]  # of the tokens that are equal
    same_language: bool


@dataclass(frozen=True, slots=True, eq=False)
class References:
    """The network in float32, and rounded to bfloat16 as torch does it, on one device."""

    exact: Whisper
    rounded: Whisper
    rules: RuleBook

    @staticmethod
    def of(model: Whisper, rules: RuleBook, device: str) -> "References":
        """``model`` is used up."""
        rounded = Whisper.without_values(model.config)
        rounded.load_state_dict(model.state_dict())
        return References(model.eval().to(device), rounded.eval().to(device, torch.bfloat16), rules)


def windows(clips: Sequence[Clip]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Each clip in parts of up to 30 s."""
    for clip in clips:
        for index, first in enumerate(range(0, len(clip.samples), WINDOW_SAMPLES)):
            samples = clip.samples[first : first + WINDOW_SAMPLES]
            if len(samples) >= MIN_WINDOW_SAMPLES:
                yield (clip.name if index == 0 else f"{clip.name}, part {index + 1}"), samples


class Comparison:
    """One backend beside the references."""

    def __init__(self, references: References, backend: Backend) -> None:
        self._references = references
        self._exact = TorchBackend(references.exact, references.rules)
        self._rounded = TorchBackend(references.rounded, references.rules)
        self._backend = backend

    @torch.inference_mode()
    def compare(self, name: str, samples: NDArray[np.float32]) -> Compared | None:
        """One window, ``None`` if it is digital silence to all."""
        (wanted_audio,), (found_audio,) = self._exact.listen([samples]), self._backend.listen([samples])
        if wanted_audio is None and found_audio is None:
            return None
        assert wanted_audio is not None and found_audio is not None, f"{name}: silence to one of them alone"
        try:
            return self._compare(name, samples, wanted_audio, found_audio)
        finally:
            self._backend.forget([found_audio])

    def _compare(self, name: str, samples: NDArray[np.float32], wanted_audio: Audio, found_audio: Audio) -> Compared:
        special, rules = self._references.rules.special, self._references.rules.plain
        task: tuple[int, ...] = ()
        same_language = True
        if special.languages:
            (wanted_guess,) = self._exact.guess_languages([wanted_audio])
            (found_guess,) = self._backend.guess_languages([found_audio])
            same_language = wanted_guess.index == found_guess.index
            task = (special.languages[wanted_guess.index], special.transcribe)
        head = (special.start_of_transcript, *task, special.no_timestamps)
        request = Request(head, 0, (), (), max_sampled_tokens(len(samples)))
        (found,) = self._backend.write([Writing(found_audio, request, rules)])
        (wanted,) = self._exact.write([Writing(wanted_audio, replace(request, draft=found.tokens), rules)])
        whole_wanted, whole_found = (
            (*one.tokens, special.end_of_text) if one.has_ended else one.tokens for one in (wanted, found)
        )
        pairs = list(zip(whole_wanted, whole_found, strict=False))
        n_equal = next((index for index, (one, other) in enumerate(pairs) if one != other), len(pairs))
        difference = None
        if n_equal < len(pairs):
            (rounded_audio,) = self._rounded.listen([samples])
            difference = self._difference(name, head, whole_wanted, whole_found, n_equal, wanted_audio, rounded_audio)
        errors = [one - other for one, other in zip(found.logprobs[:n_equal], wanted.logprobs[:n_equal], strict=False)]
        return Compared(len(whole_wanted), n_equal, difference, tuple(errors), same_language)

    def _difference(
        self,
        name: str,
        head: tuple[int, ...],
        wanted: tuple[int, ...],
        found: tuple[int, ...],
        index: int,
        exact_audio: Audio,
        rounded_audio: Audio,
    ) -> Difference:
        written = wanted[:index]
        tokens = [wanted[index], found[index]]
        exact, rounded = (
            self._logits(model, audio, (*head, *written))[:, tokens]
            for model, audio in ((self._references.exact, exact_audio), (self._references.rounded, rounded_audio))
        )
        moved = float(((rounded - exact)[:, 0] - (rounded - exact)[:, 1]).abs().max())
        step = 2.0 ** (math.floor(math.log2(float(exact[-1].abs().max()))) - 7)  # bfloat16 has 8 bits
        gap = float(exact[-1, 0] - exact[-1, 1])
        return Difference(name, index, wanted[index], found[index], gap, max(moved, step))

    def _logits(self, model: Whisper, audio: Audio, fed: tuple[int, ...]) -> Tensor:
        """[fed, tokens] before any rule: both tokens were picked, so none forbids them."""
        assert isinstance(audio, DecoderCache), "a torch backend's"
        audio.n_tokens = 0
        hidden = model.decoder(torch.tensor([fed], device=audio.cross_keys[0].device), audio)
        return model.logits(hidden)[0].float().cpu()


def compare_all(comparison: Comparison, clips: Sequence[Clip]) -> list[Compared]:
    """Every window that is not silent to all, with a line on standard error now and then."""
    compared: list[Compared] = []
    began_s = time.monotonic()
    for index, clip in enumerate(windows(clips)):
        one = comparison.compare(*clip)
        difference = None
        if one is not None:
            compared.append(one)
            difference = one.difference
        if index % REPORT_WINDOWS == 0 or difference is not None:
            print(f"{time.monotonic() - began_s:.0f} s, window {index}: {difference}", file=sys.stderr, flush=True)
    return compared


def summary(name: str, backend: str, compared: Sequence[Compared]) -> str:
    """One line of the table."""
    differences = [one.difference for one in compared if one.difference is not None]
    errors = np.array([error for one in compared for error in one.logprob_errors] or [0.0])
    n_lines = len(compared)
    return (
        f"| {name} | {backend} | {n_lines} | {sum(one.n_tokens for one in compared)} "
        f"| {n_lines - len(differences)} | {sum(one.is_rounding for one in differences)} "
        f"| {sum(not one.is_rounding for one in differences)} | {sum(not one.same_language for one in compared)} "
        f"| {math.sqrt(float((errors**2).mean())):.4f} | {float(np.abs(errors).max()):.3f} |"
    )


HEADER = (
    "| model | backend | windows | tokens | same text | differ by rounding | differ otherwise | other language "
    "| error of log-probabilities, rms | largest |\n|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"
)


def listing(differences: Sequence[Difference], tokenizer: WhisperTokenizer) -> str:
    """Every difference, the widest gap first."""
    lines = ["| clip | token | reference | backend | gap | rounding |", "|---|---:|---|---|---:|---:|"]
    for one in sorted(differences, key=lambda one: -one.gap):
        wanted, found = (repr(tokenizer.decode([token])) for token in (one.wanted, one.found))
        lines.append(f"| {one.clip} | {one.index} | {wanted} | {found} | {one.gap:.3f} | {one.rounding:.3f} |")
    return "\n".join(lines)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["whisper-tiny.en", "whisper-base"])
    parser.add_argument("--cpu", action="store_true", help="the CPU's backend, also where there is a GPU")
    parser.add_argument("--recordings", type=Path, help="a folder, of which every file is decoded")
    parser.add_argument("--max-clips", type=int, default=1_000)
    arguments = parser.parse_args()
    clips, unread = recordings_in(arguments.recordings) if arguments.recordings else (known_clips(), [])
    clips = clips[: arguments.max_clips]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(heading("Tokens beside the float32 reference"))
    print(f"{len(clips)} clips, {sum(clip.duration_s for clip in clips) / 60:.0f} minutes.")
    if unread:
        print(f"\nNot read as audio: {', '.join(unread)}.")
    print(f"\n{HEADER}", flush=True)
    listings = []
    for name in arguments.models:
        files = find_model(name)
        tokenizer = WhisperTokenizer.load(files.tokenizer)
        model = read_model(files)
        rules = rule_book(tokenizer, model.config.n_vocab)
        every = offers(lambda files=files: read_model(files), rules, Timeline())  # type: ignore[misc]
        wanted = [offer for offer in every if offer.name == TORCH_CPU or not arguments.cpu]
        backends = Backends(wanted, model=name)
        references = References.of(model, rules, device)
        compared = compare_all(Comparison(references, backends.current), clips)
        print(summary(name, backends.name, compared), flush=True)
        differences = [one.difference for one in compared if one.difference is not None]
        listings.append(f"\n## {name}\n\n{listing(differences, tokenizer)}")
        backends.current.close()
        rival = compare_all(Comparison(references, TorchBackend(references.rounded, rules)), clips)
        print(summary(name, "torch, bfloat16", rival), flush=True)
    print("\n".join(listings))


if __name__ == "__main__":
    main()
