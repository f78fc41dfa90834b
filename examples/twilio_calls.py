"""Prints what is said on Twilio calls while they last: both legs, digits too.

    python examples/twilio_calls.py

Needs a server that Twilio can reach, and TwiML that forks the call's audio to it, both legs in one socket:

    <Response>
      <Start><Stream url="wss://gateway.example/telephony/twilio" track="both_tracks"/></Start>
      <Dial>+15550100</Dial>
    </Response>

The server looks at Twilio's signature where SENSEWAY_TWILIO_AUTH_TOKEN is set; where it asks for keys, one stands
behind the path: ``/telephony/twilio/KEY``. Any other carrier or PBX of docs/clients.md is followed in the same way.
"""

import argparse
import asyncio
import json

import websockets.asyncio.client

NAMES = {"inbound": "caller", "outbound": "callee"}


async def main() -> None:
    """Follow all calls, or one, until it ends."""
    parser = argparse.ArgumentParser(description="Prints what is said on telephone calls.")
    parser.add_argument("--url", default="ws://127.0.0.1:8300/v1/calls", help="/v1/calls/CALL follows one call")
    parser.add_argument("--key", help="an API key, where the server asks for one")
    parser.add_argument("--once", action="store_true", help="stop when a call has ended")
    arguments = parser.parse_args()
    headers = {"Authorization": f"Bearer {arguments.key}"} if arguments.key else {}
    async with websockets.asyncio.client.connect(arguments.url, additional_headers=headers) as calls:
        print("following", flush=True)
        async for message in calls:
            event = json.loads(message)
            show(event)
            if event["type"] == "call_ended" and arguments.once:
                return


def show(event: dict) -> None:
    """One line for what a person would want to read."""
    call = event["call"][-8:]
    match event["type"]:
        case "final" if event["text"]:
            who = NAMES.get(event["track"], event["track"])
            print(f"{call} {event['start_s']:7.2f} {who}: {event['text']}", flush=True)
        case "dtmf":
            print(f"{call}         pressed {event['value']}", flush=True)
        case "call_started" | "call_ended" as kind:
            print(f"{call}         {kind.replace('_', ' ')}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
