"""Drives LiveKit's unmodified speech-to-text plugins against a server; prints their events, as JSON lines.

Runs in an environment that has only LiveKit's packages: imports nothing of this project.
"""

import argparse
import asyncio
import json
import logging
import wave

import aiohttp
from livekit import rtc
from livekit.agents import stt, utils

FRAME_S = 0.02
SETTLE_S = 8.0  # at most, for the last final


def plugin_of(arguments: argparse.Namespace, session: aiohttp.ClientSession) -> stt.STT:
    """The plugin under test."""
    from livekit.plugins import openai

    match arguments.what:
        case "realtime-server-vad":
            return openai.STT(
                base_url=f"http://{arguments.address}/v1",
                api_key=arguments.key,
                model="gpt-4o-transcribe",
                use_realtime=True,
            )
        case "realtime-local-vad":  # the model's name makes the plugin run its own detector and commit
            url = f"http://{arguments.address}/v1"
            return openai.STT(base_url=url, api_key=arguments.key, model="gpt-realtime-whisper")
        case "deepgram":
            from livekit.plugins import deepgram

            return deepgram.STT(api_key=arguments.key, base_url=f"http://{arguments.address}/v1/listen", model="nova-3")
        case "deepgram-flux":
            from livekit.plugins import deepgram

            return deepgram.STTv2(
                api_key=arguments.key, base_url=f"http://{arguments.address}/v2/listen", model="flux-general-en"
            )
        case "rest":
            return openai.STT(base_url=f"http://{arguments.address}/v1", api_key=arguments.key, model="whisper-1")
        case _:
            raise ValueError(arguments.what)


def frames_of(file_name: str) -> list[rtc.AudioFrame]:
    """A recording in frames of 20 ms."""
    with wave.open(file_name) as file:
        rate_hz, pcm = file.getframerate(), file.readframes(file.getnframes())
    n_samples = round(FRAME_S * rate_hz)
    pieces = [pcm[at : at + 2 * n_samples] for at in range(0, len(pcm) - 2 * n_samples, 2 * n_samples)]
    return [rtc.AudioFrame(piece, rate_hz, 1, n_samples) for piece in pieces]


def tell(event: stt.SpeechEvent) -> None:
    """Print one event."""
    best = event.alternatives[0] if event.alternatives else None
    usage = event.recognition_usage
    told = {
        "event": event.type.value,
        "request_id": event.request_id,
        "text": best.text if best else None,
        "start_s": best.start_time if best else None,
        "end_s": best.end_time if best else None,
        "n_words": len(best.words or []) if best else 0,
        "audio_s": usage.audio_duration if usage else None,
    }
    print(json.dumps(told), flush=True)


async def stream(arguments: argparse.Namespace, plugin: stt.STT) -> None:
    """Send a recording in real time, and wait for the last final."""
    speech = plugin.stream()
    has_final = asyncio.Event()

    async def listen() -> None:
        async for event in speech:
            tell(event)
            if event.type is stt.SpeechEventType.FINAL_TRANSCRIPT:
                has_final.set()

    listening = asyncio.create_task(listen())
    for frame in frames_of(arguments.file):
        speech.push_frame(frame)
        await asyncio.sleep(FRAME_S)
    await asyncio.wait_for(has_final.wait(), SETTLE_S)
    await asyncio.sleep(0.5)  # for what follows the final
    await speech.aclose()
    listening.cancel()


async def main() -> None:
    """See the flags."""
    logging.disable(logging.INFO)
    parser = argparse.ArgumentParser()
    parser.add_argument("what")
    parser.add_argument("--address", required=True)
    parser.add_argument("--file", required=True)
    parser.add_argument("--key", default="unused")
    arguments = parser.parse_args()
    async with utils.http_context.open():
        session = utils.http_context.http_session()
        plugin = plugin_of(arguments, session)
        if arguments.what == "rest":
            tell(await plugin.recognize(frames_of(arguments.file)))
        else:
            await stream(arguments, plugin)
        await plugin.aclose()


if __name__ == "__main__":
    asyncio.run(main())
