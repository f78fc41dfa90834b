"""Requests that join and leave by the million steps: does any ever write something else, does the kernel ever give up.

Run from the project's root, on a machine with an NVIDIA GPU:

    python -m benchmarks.soak --steps 1000000

A Whisper's decoder with random weights. Slots are opened anew whenever one is done, with one of three prompts, lengths
and windows each, every other time with a draft that holds in part, and now and then cancelled. What a slot writes to
the same prompt must always be the same, whatever the others do. Some launches have an SM that stops, as if it hung: how
soon that is found is timed from the last record before it, and the texts that it interrupts are compared as well.
"""

import argparse
import sys
import time
from dataclasses import dataclass, replace

import numpy as np

from benchmarks import shapes
from benchmarks.report import heading
from benchmarks.shapes import CONFIGS, median_and_p95
from megakernel.mailbox import DoneRecord, TokenRecord
from megakernel.request import Request
from megakernel.runtime import Runtime
from models.whisper.config import WhisperConfig

N_POSITIONS = (250, 700, 1500)  # of the prompts' windows
N_TOKENS = (40, 150, 400)
SHARE_CANCELLED = 0.03
STALL_STEP = 300  # of its launch
REPORT_S = 10.0


@dataclass(slots=True)
class _Open:
    """What a slot is doing."""

    prompt: int
    tokens: list[int]
    cancel_at: int  # tokens after which it is cancelled


class Soak:
    """What is open, and what each slot has ever written to each prompt."""

    def __init__(self, runtime: Runtime, config: WhisperConfig, *, n_slots: int, n_sms: int) -> None:
        self._runtime = runtime
        self._config = config
        self._random = np.random.default_rng(0)
        self._open: dict[int, _Open] = {}
        self._known: dict[tuple[int, int], list[int]] = {}  # slot and prompt → the longest text
        self._n_slots, self._n_sms = n_slots, n_sms
        self._heard_at_s = 0.0  # when the last record came
        self.found_ms: list[float] = []  # from the last record to each fault
        self.n_tokens = self.n_requests = self.n_cancelled = self.n_drafted = self.n_verified = self.n_differences = 0
        self.n_stalls = 0

    def run(self, n_steps: int, n_stalls: int, max_s: float) -> None:
        """Open, read and compare, until the device has made ``n_steps`` or the time is up."""
        began_s = said_s = self._heard_at_s = time.monotonic()
        for slot in range(self._n_slots):
            self._open_one(slot)
        self._runtime.burst()
        stall_at = [n_steps * (1 + number) // (n_stalls + 1) for number in range(n_stalls)]
        while self._runtime.n_steps < n_steps and (now_s := time.monotonic()) - began_s < max_s:
            self._read()
            if stall_at and self._runtime.n_steps >= stall_at[0]:
                self._runtime.inject_stall(sm=int(self._random.integers(self._n_sms)), step=STALL_STEP)
                self.n_stalls += 1
                stall_at.pop(0)
            if now_s - said_s > REPORT_S:
                said_s = now_s
                print(f"{now_s - began_s:.0f} s: {self.counts()}", file=sys.stderr, flush=True)

    def counts(self) -> str:
        """For a look while it runs."""
        return f"{self._runtime.n_steps} steps, {self.n_tokens} tokens, {self.n_differences} texts that differ"

    def _read(self) -> None:
        n_faults = len(self._runtime.faults)
        records = self._runtime.records()
        now_s = time.monotonic()
        if len(self._runtime.faults) > n_faults:
            self.found_ms.append((now_s - self._heard_at_s) * 1e3)
        if records:
            self._heard_at_s = now_s
        for record in records:
            one = self._open[record.slot]
            if isinstance(record, TokenRecord):
                one.tokens.append(record.token)
                if len(one.tokens) == one.cancel_at:
                    self._runtime.cancel(record.slot)
                    self.n_cancelled += 1
            elif isinstance(record, DoneRecord):
                self.n_verified += record.n_verified
                self._compare(record.slot)
                self._open_one(record.slot)

    def _open_one(self, slot: int) -> None:
        prompt, n_tokens = int(self._random.integers(len(N_POSITIONS))), int(self._random.choice(N_TOKENS))
        is_cancelled = self._random.random() < SHARE_CANCELLED
        self._open[slot] = _Open(prompt, [], int(self._random.integers(1, n_tokens)) if is_cancelled else 0)
        self._runtime.open(slot, self._request(prompt, n_tokens, self._draft(slot, prompt)))

    def _draft(self, slot: int, prompt: int) -> tuple[int, ...]:
        """Every other time what it wrote before, with a wrong token in it."""
        known = self._known.get((slot, prompt), [])[:40]
        if not known or self._random.random() < 0.5:
            return ()
        self.n_drafted += 1
        wrong = int(self._random.integers(len(known)))
        return (
            *known[:wrong],
            (known[wrong] + 1) % shapes.special_tokens(self._config).end_of_text,
            *known[wrong + 1 :],
        )

    def _request(self, prompt: int, n_tokens: int, draft: tuple[int, ...]) -> Request:
        plain = shapes.request(n_tokens, draft=draft, config=self._config)
        return replace(plain, head=(*plain.head[:-1], plain.head[-1] - prompt), n_positions=N_POSITIONS[prompt])

    def _compare(self, slot: int) -> None:
        key, tokens = (slot, self._open[slot].prompt), self._open[slot].tokens
        known = self._known.get(key, [])
        n_common = min(len(known), len(tokens))
        self.n_differences += known[:n_common] != tokens[:n_common]
        if len(tokens) > len(known):
            self._known[key] = tokens
        self.n_tokens += len(tokens)
        self.n_requests += 1


def main() -> None:
    """Print the counts as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(CONFIGS), default="large-v3-turbo")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--stalls", type=int, default=10)
    parser.add_argument("--max-seconds", type=float, default=1_200.0)
    arguments = parser.parse_args()
    decoders = shapes.load(CONFIGS[arguments.model])
    runtime = Runtime(decoders.program, decoders.launcher, n_rules=1)
    soak = Soak(runtime, decoders.config, n_slots=arguments.slots, n_sms=decoders.program.target.n_sms)
    began_s = time.monotonic()
    soak.run(arguments.steps, arguments.stalls, arguments.max_seconds)
    seconds = time.monotonic() - began_s
    typical_ms, _ = median_and_p95(soak.found_ms or [0.0])
    print(heading(f"Requests that join and leave, Whisper {arguments.model}'s decoder, random weights"))
    print("| | |\n|---|---:|")
    print(f"| seconds | {seconds:.0f} |\n| steps | {runtime.n_steps} |\n| requests | {soak.n_requests} |")
    print(f"| of them with a draft | {soak.n_drafted} |\n| cancelled | {soak.n_cancelled} |")
    print(f"| tokens | {soak.n_tokens} |\n| of them from drafts | {soak.n_verified} |")
    print(f"| texts that differ | {soak.n_differences} |\n| SMs made to stop | {soak.n_stalls} |")
    print(f"| found after, ms, median | {typical_ms:.1f} |\n| at most | {max(soak.found_ms, default=0.0):.1f} |")
    print(f"| faults | {len(runtime.faults)} |\n| ended in mode | {runtime.mode} |")
    print(f"\nFaults: {'; '.join(map(str, runtime.faults)) or 'none'}.")
    runtime.close()


if __name__ == "__main__":
    main()
