"""Drives unmodified Pipecat services against a server; prints the frames that they push, as JSON lines.

Runs in an environment that has only Pipecat: imports nothing of this project.
"""

import argparse
import asyncio
import json
import wave

from loguru import logger
from pipecat.frames.frames import (
    EndFrame,
    ErrorFrame,
    Frame,
    InputAudioRawFrame,
    InterimTranscriptionFrame,
    ProposedUserStartedSpeakingFrame,
    ProposedUserStoppedSpeakingFrame,
    StartFrame,
    TranscriptionFrame,
    VADUserStartedSpeakingFrame,
    VADUserStoppedSpeakingFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.workers.runner import WorkerRunner

TOLD = (
    ErrorFrame,
    InterimTranscriptionFrame,
    ProposedUserStartedSpeakingFrame,
    ProposedUserStoppedSpeakingFrame,
    TranscriptionFrame,
    VADUserStartedSpeakingFrame,
    VADUserStoppedSpeakingFrame,
)
FRAME_S = 0.02
SETTLE_S = 8.0  # at most, for the last final


class Ear(FrameProcessor):
    """Prints what passes; knows when a final has come behind everything that was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.is_started = asyncio.Event()
        self.has_final = asyncio.Event()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, StartFrame):
            self.is_started.set()
        if isinstance(frame, TOLD):
            text = getattr(frame, "text", None) or getattr(frame, "error", None)
            print(json.dumps({"frame": type(frame).__name__, "text": text}), flush=True)
        if isinstance(frame, TranscriptionFrame):
            self.has_final.set()
        await self.push_frame(frame, direction)


def service_of(arguments: argparse.Namespace) -> list[FrameProcessor]:
    """The service under test, behind a detector of Pipecat's own where the service needs one."""
    from pipecat.services.openai.stt import OpenAIRealtimeSTTService, OpenAISTTService

    match arguments.what:
        case "realtime-server-vad":
            url = f"ws://{arguments.address}/v1/realtime"
            turns = {"type": "server_vad"}
            return [OpenAIRealtimeSTTService(api_key=arguments.key, base_url=url, turn_detection=turns)]
        case "realtime-local-vad":
            url = f"ws://{arguments.address}/v1/realtime"
            return [local_vad(), OpenAIRealtimeSTTService(api_key=arguments.key, base_url=url)]
        case "deepgram":
            from pipecat.services.deepgram.stt import DeepgramSTTService

            return [local_vad(), DeepgramSTTService(api_key=arguments.key, base_url=f"ws://{arguments.address}")]
        case "deepgram-flux":
            from pipecat.services.deepgram.flux.stt import DeepgramFluxSTTService

            return [DeepgramFluxSTTService(api_key=arguments.key, url=f"ws://{arguments.address}/v2/listen")]
        case "rest":
            url = f"http://{arguments.address}/v1"
            return [local_vad(), OpenAISTTService(api_key=arguments.key, base_url=url)]
        case _:
            raise ValueError(arguments.what)


def local_vad() -> FrameProcessor:
    """Pipecat's own detector."""
    from pipecat.audio.vad.silero import SileroVADAnalyzer
    from pipecat.processors.audio.vad_processor import VADProcessor

    return VADProcessor(vad_analyzer=SileroVADAnalyzer())


async def run(arguments: argparse.Namespace) -> None:
    """Send a recording in real time, and wait for the last final."""
    with wave.open(arguments.file) as file:
        rate_hz, pcm = file.getframerate(), file.readframes(file.getnframes())
    ear = Ear()
    worker = PipelineWorker(
        Pipeline([*service_of(arguments), ear]),
        cancel_on_idle_timeout=False,
        params=PipelineParams(audio_in_sample_rate=rate_hz),
    )

    async def speak() -> None:
        await ear.is_started.wait()
        step = 2 * round(FRAME_S * rate_hz)
        for at in range(0, len(pcm), step):
            frame = InputAudioRawFrame(audio=pcm[at : at + step], sample_rate=rate_hz, num_channels=1)
            await worker.queue_frame(frame)
            await asyncio.sleep(FRAME_S)
        try:
            await asyncio.wait_for(ear.has_final.wait(), SETTLE_S)
        finally:
            await worker.queue_frame(EndFrame())

    runner = WorkerRunner()
    await runner.add_workers(worker)
    await asyncio.gather(runner.run(), speak())


def main() -> None:
    """See the flags."""
    logger.remove()
    parser = argparse.ArgumentParser()
    parser.add_argument("what")
    parser.add_argument("--address", required=True)
    parser.add_argument("--file", required=True)
    parser.add_argument("--key", default="unused")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
