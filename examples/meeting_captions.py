"""Writes subtitles while it listens: raw audio in, an SRT file that grows with every sentence.

    arecord -f S16_LE -r 16000 -c 1 -t raw | python examples/meeting_captions.py meeting.srt
    ffmpeg -i talk.mp4 -f s16le -ar 16000 -ac 1 - | python examples/meeting_captions.py talk.srt

Needs a server (`make serve`) and, of this project, the client alone: websockets and msgpack.
"""

import argparse
import asyncio
import sys
from typing import BinaryIO, TextIO

from gateway.client import AudioFormat, Final, Hello, Partial, StreamClient, connect

FRAME_BYTES = 3_200  # 100 ms of 16-bit audio at 16 kHz


async def main() -> None:
    """Send what comes in, write what is said."""
    parser = argparse.ArgumentParser(description="Writes subtitles while it listens.")
    parser.add_argument("file", help="the SRT file to write")
    parser.add_argument("--url", default="ws://127.0.0.1:8300/v1/stream")
    arguments = parser.parse_args()
    hello = Hello(audio=AudioFormat("s16le", sample_rate_hz=16_000))
    with open(arguments.file, "w", encoding="utf-8") as subtitles:
        async with connect(arguments.url, hello) as stream:
            sending = asyncio.create_task(send(stream, sys.stdin.buffer))
            await write(stream, subtitles)
            await sending


async def send(stream: StreamClient, audio: BinaryIO) -> None:
    """Read on a thread: a pipe may have nothing for a while."""
    while data := await asyncio.to_thread(audio.read, FRAME_BYTES):
        await stream.send_audio(data)
    await stream.bye()


async def write(stream: StreamClient, subtitles: TextIO) -> None:
    """One cue for each final; what is not settled yet goes to the terminal."""
    n_cues = 0
    async for event in stream:
        match event:
            case Partial(text=text):
                print(f"\r\x1b[2K{text[-100:]}", end="", file=sys.stderr, flush=True)
            case Final(text=text, start_s=start_s, end_s=end_s) if text:
                n_cues += 1
                print(f"\r\x1b[2K{text}", file=sys.stderr)
                subtitles.write(f"{n_cues}\n{clock(start_s)} --> {clock(end_s)}\n{text}\n\n")
                subtitles.flush()


def clock(time_s: float) -> str:
    """00:01:02,345."""
    minutes, ms = divmod(round(time_s * 1_000), 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{ms // 1_000:02},{ms % 1_000:03}"


if __name__ == "__main__":
    asyncio.run(main())
