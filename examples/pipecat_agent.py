"""A Pipecat pipeline: a recording speaks, Senseway listens, and a stub in place of a language model answers.

    python examples/pipecat_agent.py speech.wav --url ws://127.0.0.1:8300/v1/realtime

Needs a server (`make serve`) and an environment with `pipecat-ai[openai]`. Only ``base_url`` of the speech-to-text
service tells that it is not the hosted one. Put a transport, a real model and a voice in the places of the stubs.
"""

import argparse
import asyncio
import wave

from pipecat.frames.frames import (
    EndFrame,
    Frame,
    InputAudioRawFrame,
    InterimTranscriptionFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    LLMTextFrame,
    StartFrame,
    TranscriptionFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.stt import OpenAIRealtimeSTTService
from pipecat.workers.runner import WorkerRunner

FRAME_S = 0.02
PATIENCE_S = 20.0


class Echo(FrameProcessor):
    """In place of a language model: says what it heard."""

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, TranscriptionFrame):
            print(f"user: {frame.text}", flush=True)
            await self.push_frame(LLMFullResponseStartFrame())
            await self.push_frame(LLMTextFrame(f"You said: {frame.text}"))
            await self.push_frame(LLMFullResponseEndFrame())
        elif isinstance(frame, InterimTranscriptionFrame):
            print(f"....: {frame.text}", flush=True)
        else:
            await self.push_frame(frame, direction)


class Terminal(FrameProcessor):
    """In place of a voice: prints what the pipeline says."""

    def __init__(self) -> None:
        super().__init__()
        self.is_started = asyncio.Event()
        self.has_answer = asyncio.Event()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, StartFrame):
            self.is_started.set()
        if isinstance(frame, LLMTextFrame):
            print(f"bot: {frame.text}", flush=True)
            self.has_answer.set()
        await self.push_frame(frame, direction)


async def main() -> None:
    """Listen until the pipeline has answered."""
    parser = argparse.ArgumentParser(description="A Pipecat pipeline that listens through Senseway.")
    parser.add_argument("file", help="a WAV file, 16 bits, mono")
    parser.add_argument("--url", default="ws://127.0.0.1:8300/v1/realtime")
    parser.add_argument("--key", default="unused")
    arguments = parser.parse_args()
    with wave.open(arguments.file) as file:
        rate_hz, pcm = file.getframerate(), file.readframes(file.getnframes())
    stt = OpenAIRealtimeSTTService(api_key=arguments.key, base_url=arguments.url, turn_detection={"type": "server_vad"})
    terminal = Terminal()
    worker = PipelineWorker(
        Pipeline([stt, Echo(), terminal]),
        cancel_on_idle_timeout=False,
        params=PipelineParams(audio_in_sample_rate=rate_hz),
    )

    async def speak() -> None:
        await terminal.is_started.wait()
        n_bytes = 2 * round(FRAME_S * rate_hz)
        for at in range(0, len(pcm), n_bytes):
            frame = InputAudioRawFrame(audio=pcm[at : at + n_bytes], sample_rate=rate_hz, num_channels=1)
            await worker.queue_frame(frame)
            await asyncio.sleep(FRAME_S)
        try:
            await asyncio.wait_for(terminal.has_answer.wait(), PATIENCE_S)
        finally:
            await worker.queue_frame(EndFrame())

    runner = WorkerRunner()
    await runner.add_workers(worker)
    await asyncio.gather(runner.run(), speak())


if __name__ == "__main__":
    asyncio.run(main())
