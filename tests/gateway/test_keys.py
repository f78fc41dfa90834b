"""Who may come in: keys from the environment and a file, and where one may listen without any."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import API_KEYS_VARIABLE, ConfigError, ServerConfig, as_toml, load
from gateway.keys import Keys, claims_of, exposure_problem, load_keys

KEY = "sk-very-secret"
NOW_S = 1_800_000_000.0


def test_without_keys_everybody_is_admitted_and_with_keys_only_who_has_one() -> None:
    assert Keys().admit(None, NOW_S) and Keys().admit("x", NOW_S) and not Keys()
    keys = Keys([KEY, "other"])
    assert keys and keys.admit(KEY, NOW_S) and keys.admit("other", NOW_S)
    assert not any(keys.admit(wrong, NOW_S) for wrong in (None, "", KEY[:-1], KEY + "x", KEY.upper(), "é"))


def test_keys_come_from_the_environment_and_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the voice team\nabc\n\n def \n")
    keys = load_keys(ServerConfig(api_keys_file=str(path)), environ={API_KEYS_VARIABLE: f"{KEY}, ghi"})
    assert all(keys.admit(key, NOW_S) for key in ("abc", "def", "ghi", KEY))
    assert not keys.admit("# of the voice team", NOW_S)


def test_a_pass_opens_until_its_time_and_carries_what_it_was_given() -> None:
    keys = Keys([KEY])
    key = keys.issue({"session": {"type": "transcription"}}, int(NOW_S) + 60)
    assert keys.admit(key, NOW_S) and keys.admit(key, NOW_S + 59) and not keys.admit(key, NOW_S + 60)
    assert not keys.is_lasting(key)
    assert claims_of(key)["session"] == {"type": "transcription"}


def test_a_pass_that_was_changed_or_is_anothers_does_not_open() -> None:
    keys = Keys([KEY])
    key = keys.issue({}, int(NOW_S) + 60)
    longer = keys.issue({}, int(NOW_S) + 6_000)
    mixed = longer.partition(".")[0] + "." + key.partition(".")[2]
    other = Keys([KEY]).issue({}, int(NOW_S) + 60)
    for wrong in (mixed, other, key[:-2], key + "A", "ek_", "ek_.", "ek_é.x", key.partition(".")[0]):
        assert not keys.admit(wrong, NOW_S)


def test_a_pass_can_stand_in_a_header_and_in_a_subprotocol() -> None:
    key = Keys().issue({"session": {"prompt": "Zürich, 東京"}}, 1)
    assert re.fullmatch(r"[A-Za-z0-9_.-]+", key)
    assert claims_of(key)["session"]["prompt"] == "Zürich, 東京"


@given(st.text(max_size=30))
def test_whatever_the_key_its_claims_are_an_object(key: str) -> None:
    assert isinstance(claims_of(key), dict) and isinstance(claims_of("ek_" + key), dict)


@pytest.mark.parametrize("content", [None, "", "# nothing yet\n"])
def test_a_key_file_that_holds_none_stops_the_start(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="api_keys_file"):
        load_keys(ServerConfig(api_keys_file=str(path)), environ={})


def test_no_key_shows_in_what_is_printed() -> None:
    config = load({}, environ={API_KEYS_VARIABLE: KEY})
    keys = Keys([KEY])
    assert KEY not in as_toml(config) and KEY not in repr(config)
    assert KEY not in repr(keys) + str(vars(keys))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert exposure_problem(ServerConfig(host=host), Keys()) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "gateway.example"])
def test_a_wider_address_needs_keys_or_an_explicit_word(host: str) -> None:
    problem = exposure_problem(ServerConfig(host=host), Keys())
    assert problem is not None and host in problem and "--allow-anonymous" in problem
    assert exposure_problem(ServerConfig(host=host), Keys([KEY])) is None
    assert exposure_problem(ServerConfig(host=host, allow_anonymous=True), Keys()) is None
    audiosocket = exposure_problem(ServerConfig(host=host, audiosocket_port=9_092), Keys([KEY]))
    assert audiosocket is not None and "9092" in audiosocket
