"""Many requests that join and leave: does any of them ever write something else, and does the kernel ever give up.

Run from the project's root, on a machine with an NVIDIA GPU:

    python -m benchmarks.soak --seconds 300

Whisper large-v3-turbo's decoder, random weights. Three slots are opened anew whenever one is done, with one of three
prompts, lengths and windows each; what a slot writes to the same prompt must always be the same, whatever the others
do.
"""

import argparse
import time
from dataclasses import replace

import numpy as np

from benchmarks import turbo
from benchmarks.report import heading
from megakernel.mailbox import DoneRecord, TokenRecord
from megakernel.request import Request
from megakernel.runtime import Runtime

N_SLOTS = 3
N_POSITIONS = (250, 700, 1500)  # of the prompts' windows
N_TOKENS = (40, 150, 400)


class Soak:
    """What is open, and what each slot has ever written to each prompt."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._random = np.random.default_rng(0)
        self._open: dict[int, tuple[int, list[int]]] = {}  # slot → prompt, tokens so far
        self._known: dict[tuple[int, int], list[int]] = {}  # slot and prompt → the longest text
        self.n_tokens = self.n_requests = self.n_differences = 0

    def run(self, seconds: float) -> None:
        """Open, read and compare."""
        for slot in range(N_SLOTS):
            self._open_one(slot)
        self._runtime.burst()
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            for record in self._runtime.records():
                if isinstance(record, TokenRecord):
                    self._open[record.slot][1].append(record.token)
                elif isinstance(record, DoneRecord):
                    self._compare(record.slot)
                    self._open_one(record.slot)

    def _open_one(self, slot: int) -> None:
        prompt = int(self._random.integers(len(N_POSITIONS)))
        self._open[slot] = prompt, []
        self._runtime.open(slot, self._request(prompt, int(self._random.choice(N_TOKENS))))

    @staticmethod
    def _request(prompt: int, n_tokens: int) -> Request:
        plain = turbo.request(n_tokens)
        return replace(plain, head=(*plain.head[:-1], plain.head[-1] - prompt), n_positions=N_POSITIONS[prompt])

    def _compare(self, slot: int) -> None:
        prompt, tokens = self._open[slot]
        known = self._known.get((slot, prompt), [])
        n_common = min(len(known), len(tokens))
        self.n_differences += known[:n_common] != tokens[:n_common]
        if len(tokens) > len(known):
            self._known[slot, prompt] = tokens
        self.n_tokens += len(tokens)
        self.n_requests += 1


def main() -> None:
    """Print the counts as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    seconds = parser.parse_args().seconds
    decoders = turbo.load()
    runtime = Runtime(decoders.program, decoders.launcher, n_rules=1)
    soak = Soak(runtime)
    soak.run(seconds)
    print(heading("Requests that join and leave, Whisper large-v3-turbo's decoder"))
    print("| seconds | requests | tokens | texts that differ | faults |\n|---:|---:|---:|---:|---:|")
    print(f"| {seconds:.0f} | {soak.n_requests} | {soak.n_tokens} | {soak.n_differences} | {len(runtime.faults)} |")
    runtime.close()


if __name__ == "__main__":
    main()
