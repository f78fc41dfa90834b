"""What it costs to decode a growing window again and again: with the last partial as draft, and afresh.

Run from the project's root:

    python -m benchmarks.partials_cost --models whisper-tiny.en whisper-base

Each clip of at least 10 s grows by half a second until it is whole (or 30 s long), as a stream's window does where
nothing is settled. Only the decoder is timed; the window is listened to once. Both ways must write the same tokens. On
a GPU the time is the wall's, on a CPU the process's. Clips are those of SENSEWAY_CLIPS (benchmarks/clips.py), else the
two recordings that the models' cache holds.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from benchmarks.clips import Clip, known_clips
from benchmarks.report import heading
from models.backends import Backends
from models.devices import TORCH_CPU
from models.store import find_model
from models.timeline import Timeline
from models.tokenizer import WhisperTokenizer
from models.whisper.backend import Backend, Writing
from models.whisper.decode import Request, RuleBook, max_sampled_tokens
from models.whisper.loading import offers, read_model
from models.whisper.vocabulary import rule_book
from models.whisper.window import WINDOW_SAMPLES
from vad.audio import samples_from_ms

MIN_CLIP_S = 10.0
GROWTH_SAMPLES = samples_from_ms(500)


@dataclass
class Cost:
    """Sums over windows."""

    n_windows: int = 0
    n_tokens: int = 0
    n_verified: int = 0
    n_different: int = 0  # windows whose two texts differ
    afresh_s: float = 0.0
    drafted_s: float = 0.0


def measure(backend: Backend, rules: RuleBook, clips: list[Clip], clock_s: Callable[[], float]) -> Cost:
    """All clips, one window at a time."""
    special = rules.special
    language = (special.languages[0], special.transcribe) if special.languages else ()  # English is the first
    head = (special.start_of_transcript, *language, special.no_timestamps)
    cost = Cost()
    for clip in clips:
        draft: tuple[int, ...] = ()
        whole = clip.samples[:WINDOW_SAMPLES]
        for end in range(2 * GROWTH_SAMPLES, len(whole) + GROWTH_SAMPLES, GROWTH_SAMPLES):
            window = whole[:end]
            (audio,) = backend.listen([window])
            if audio is None:
                continue
            plain = Writing(audio, Request(head, 0, (), (), max_sampled_tokens(len(window))), rules.plain)
            began_s = clock_s()
            (afresh,) = backend.write([plain])
            between_s = clock_s()
            (drafted,) = backend.write([replace(plain, request=replace(plain.request, draft=draft))])
            cost.drafted_s += clock_s() - between_s
            cost.afresh_s += between_s - began_s
            backend.forget([audio])
            cost.n_windows += 1
            cost.n_tokens += len(afresh.tokens)
            cost.n_verified += drafted.n_verified
            cost.n_different += afresh.tokens != drafted.tokens
            draft = drafted.tokens
    return cost


def row(name: str, backend: str, cost: Cost) -> str:
    """One line of the table."""
    ratio = cost.afresh_s / cost.drafted_s
    verified = cost.n_verified / max(cost.n_tokens, 1)
    return (
        f"| {name} | {backend} | {cost.n_windows} | {cost.n_tokens} | {100 * verified:.0f} % | {cost.afresh_s:.2f} "
        f"| {cost.drafted_s:.2f} | 1/{ratio:.1f} | {cost.n_different} |"
    )


HEADER = (
    "| model | backend | windows | tokens | of them from the draft | afresh, s | with draft, s | cost | differ |\n"
    "|---|---|---:|---:|---:|---:|---:|---:|---:|"
)


def open_backends(name: str, *, on_cpu: bool) -> tuple[Backends[Backend], RuleBook]:
    """The fastest backend of this machine, or the CPU's."""
    files = find_model(name, fetch_missing=True)
    model = read_model(files)
    rules = rule_book(WhisperTokenizer.load(files.tokenizer), model.config.n_vocab)
    every = offers(lambda: read_model(files), rules, Timeline())
    return Backends([offer for offer in every if offer.name == TORCH_CPU or not on_cpu], model=name), rules


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["whisper-tiny.en", "whisper-base"])
    parser.add_argument("--cpu", action="store_true", help="on the CPU also where there is a GPU")
    parser.add_argument("--max-clips", type=int, default=20)
    arguments = parser.parse_args()
    clips = [clip for clip in known_clips() if clip.duration_s >= MIN_CLIP_S - 0.1][: arguments.max_clips]
    torch.set_num_threads(1)
    print(heading("Decoding a growing window again, with and without the last partial as draft"))
    print(f"{len(clips)} clips of at least {MIN_CLIP_S:.0f} s.\n\n{HEADER}")
    for name in arguments.models:
        backends, rules = open_backends(name, on_cpu=arguments.cpu)
        is_cpu = backends.name == TORCH_CPU
        measure(backends.current, rules, clips[:1], time.perf_counter)  # warm
        cost = measure(backends.current, rules, clips, time.process_time if is_cpu else time.perf_counter)
        print(row(name, backends.name, cost), flush=True)
        backends.current.close()


if __name__ == "__main__":
    main()
