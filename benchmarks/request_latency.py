"""How long requests take that come at once: 10 s of audio each, from the samples to the 64th token.

Run from the project's root, on a machine with an NVIDIA GPU:

    python -m benchmarks.request_latency

Whisper large-v3-turbo at true shapes with random weights, no text ends early. Front end, encoder and decoder are the
backend's as the engine uses it: up to 8 windows together, 16 in two turns. A request's time runs from when all came
until its 64 tokens and where their alignment heads looked are in the host's memory.
"""

import argparse
import time

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.report import heading
from benchmarks.shapes import TURBO, endless_book, head, median_and_p95, random_model
from models.timeline import Timeline
from models.wheels import cache_folder
from models.whisper.backend import Writing
from models.whisper.decode import Request
from models.whisper.loading import CUBINS, on_device
from models.whisper.megakernel_backend import MegakernelBackend
from vad.audio import SAMPLE_RATE_HZ

CLIP_S = 10
N_TOKENS = 64
N_REPEATS = 11


def answer_ms(backend: MegakernelBackend, windows: list[NDArray[np.float32]]) -> tuple[list[float], float]:
    """When each request was answered, and how much of the time went into listening."""
    rules = endless_book().plain
    request = Request(head(), 0, (), (), N_TOKENS)
    answered_ms: list[float] = []
    listened_ms = 0.0
    began_s = time.perf_counter()
    for first in range(0, len(windows), backend.max_windows):
        together = windows[first : first + backend.max_windows]
        turn_s = time.perf_counter()
        audios = [audio for audio in backend.listen(together) if audio is not None]
        listened_ms += (time.perf_counter() - turn_s) * 1e3
        decoded = backend.write([Writing(audio, request, rules) for audio in audios])
        assert [len(one.tokens) for one in decoded] == [N_TOKENS] * len(together), "an answer is too short"
        backend.forget(audios)
        answered_ms += [(time.perf_counter() - began_s) * 1e3] * len(together)
    return answered_ms, listened_ms


def row(backend: MegakernelBackend, n_requests: int) -> str:
    """One line of the table."""
    rng = np.random.default_rng(0)
    windows = [rng.normal(scale=0.1, size=CLIP_S * SAMPLE_RATE_HZ).astype(np.float32) for _ in range(n_requests)]
    runs = [answer_ms(backend, windows) for _ in range(N_REPEATS + 1)][1:]
    typical_ms, _ = median_and_p95([float(np.median(answered)) for answered, _ in runs])
    last_ms, last_p95_ms = median_and_p95([max(answered) for answered, _ in runs])
    listened_ms, _ = median_and_p95([listened for _, listened in runs])
    per_s = n_requests / last_ms * 1e3
    cells = (typical_ms, last_ms, last_p95_ms, listened_ms, (last_ms - listened_ms) / N_TOKENS)
    return f"| {n_requests} | " + " | ".join(f"{cell:.2f}" for cell in cells) + f" | {per_s:.0f} |"


HEADER = (
    "| requests at once | median answer, ms | last answer, ms | its p95 | of it listening | ms a token, all turns "
    "| requests a second |\n"
    "|---:|---:|---:|---:|---:|---:|---:|"
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    arguments = parser.parse_args()
    timeline = Timeline()
    backend = on_device(random_model(), endless_book(), timeline, cache=cache_folder() / CUBINS)
    print(heading(f"{CLIP_S} s of audio to {N_TOKENS} tokens, Whisper large-v3-turbo"))
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}. {TURBO.n_encoder_layers} encoder layers.")
    print(f"Opening the backend: {timeline}.\n\n{HEADER}")
    for n_requests in arguments.requests:
        print(row(backend, n_requests), flush=True)
    backend.close()


if __name__ == "__main__":
    main()
