"""A LiveKit agent without a room: a recording speaks, Senseway listens, a stub in place of a language model answers.

    python examples/livekit_agent.py speech.wav --url http://127.0.0.1:8300/v1

Needs a server (`make serve`) and an environment with `livekit-agents[openai]`. Only ``base_url`` of the speech-to-text
plugin tells that it is not the hosted service. Put a microphone, a room and a real model in the places of the stubs.
"""

import argparse
import asyncio
import wave

from livekit import rtc
from livekit.agents import Agent, AgentSession, UserInputTranscribedEvent, llm, utils
from livekit.agents.types import DEFAULT_API_CONNECT_OPTIONS
from livekit.agents.voice.io import AudioInput, TextOutput
from livekit.plugins import openai

FRAME_S = 0.02
PATIENCE_S = 20.0


class Recording(AudioInput):
    """A WAV file in real time, and silence behind it."""

    def __init__(self, file_name: str) -> None:
        super().__init__(label="recording")
        with wave.open(file_name) as file:
            self._rate_hz, self._pcm = file.getframerate(), file.readframes(file.getnframes())
        self._position = 0

    async def __anext__(self) -> rtc.AudioFrame:
        await asyncio.sleep(FRAME_S)
        n_bytes = 2 * round(FRAME_S * self._rate_hz)
        data = self._pcm[self._position : self._position + n_bytes].ljust(n_bytes, b"\0")
        self._position += n_bytes
        return rtc.AudioFrame(data, self._rate_hz, 1, n_bytes // 2)


class Echo(llm.LLM):
    """In place of a language model: says what it heard."""

    def chat(self, *, chat_ctx, tools=None, conn_options=DEFAULT_API_CONNECT_OPTIONS, **_) -> llm.LLMStream:
        return EchoStream(self, chat_ctx=chat_ctx, tools=tools or [], conn_options=conn_options)


class EchoStream(llm.LLMStream):
    """One answer."""

    async def _run(self) -> None:
        heard = [item.text_content for item in self._chat_ctx.items if getattr(item, "role", None) == "user"]
        delta = llm.ChoiceDelta(role="assistant", content=f"You said: {heard[-1]}")
        self._event_ch.send_nowait(llm.ChatChunk(id="1", delta=delta))


class Terminal(TextOutput):
    """Prints what the agent answers."""

    def __init__(self) -> None:
        super().__init__(label="terminal", next_in_chain=None)
        self.has_answer = asyncio.Event()
        self._text = ""

    async def capture_text(self, text: str) -> None:
        self._text += text

    def flush(self) -> None:
        if self._text:
            print(f"agent: {self._text}", flush=True)
            self.has_answer.set()
        self._text = ""


async def main() -> None:
    """Listen until the agent has answered."""
    parser = argparse.ArgumentParser(description="A LiveKit agent that listens through Senseway.")
    parser.add_argument("file", help="a WAV file, 16 bits, mono")
    parser.add_argument("--url", default="http://127.0.0.1:8300/v1")
    parser.add_argument("--key", default="unused")
    arguments = parser.parse_args()
    async with utils.http_context.open():
        stt = openai.STT(base_url=arguments.url, api_key=arguments.key, model="gpt-4o-transcribe", use_realtime=True)
        session = AgentSession(stt=stt, llm=Echo(), vad=None, turn_handling={"turn_detection": "stt"})
        terminal = Terminal()
        session.input.audio = Recording(arguments.file)
        session.output.transcription = terminal

        @session.on("user_input_transcribed")
        def show(event: UserInputTranscribedEvent) -> None:
            print(f"{'user' if event.is_final else '....'}: {event.transcript}", flush=True)

        await session.start(Agent(instructions="Answer."), record=False)
        await asyncio.wait_for(terminal.has_answer.wait(), PATIENCE_S)
        await session.aclose()


if __name__ == "__main__":
    asyncio.run(main())
