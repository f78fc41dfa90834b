"""The door for those who follow calls: what the telephony doors publish, as JSON, call by call or of all of them."""

from gateway.doors.door import (
    Admission,
    AdmissionError,
    DoorEffect,
    Follow,
    Frame,
    House,
    Knock,
    LastWords,
    Refusal,
)
from gateway.doors.native import key_of
from gateway.effects import Close, Said
from gateway.errors import ERRORS, GatewayError

__all__ = ["NAME", "RESUMES", "key_of", "open_door", "refusal"]

NAME = "calls"
RESUMES = False
PATH = "/v1/calls"


class CallsDoor:
    """One follower."""

    next_wake_s = None

    def __init__(self, call_id: str) -> None:
        self._call_id = call_id

    def opened(self, now_s: float) -> list[DoorEffect]:
        """From now on."""
        return [Follow(self._call_id)]

    def receive(self, frame: Frame, now_s: float) -> list[DoorEffect]:
        """Followers have nothing to say."""
        return []

    def heard(self, track: int, said: Said, now_s: float) -> list[DoorEffect]:
        """There is no session."""
        return []

    def wake(self, now_s: float) -> list[DoorEffect]:
        """Never asked for."""
        return []

    def peer_gone(self, now_s: float) -> list[DoorEffect]:
        """Nothing to end."""
        return []

    def failed(self, error: GatewayError) -> list[LastWords]:
        """A close."""
        return [Close(ERRORS[error.code].close_code or 1011, error.code)]


def open_door(knock: Knock, house: House) -> Admission:
    """Follow the call that the path names, or all."""
    return Admission(CallsDoor(knock.path.removeprefix(PATH).strip("/")))


def refusal(error: AdmissionError, knock: Knock) -> Refusal:
    """``{"error": ..., "code": ...}``."""
    return Refusal({"error": str(error), "code": error.code})
