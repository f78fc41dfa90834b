"""Settings from three sources: what wins, what is refused, and in which words."""

from pathlib import Path

import pytest

from gateway.config import (
    Config,
    ConfigError,
    as_toml,
    from_environment,
    known_keys,
    load,
    merge,
    read_toml,
    variable_of,
)
from streaming.capability import Capability

REPOSITORY = Path(__file__).parents[2]


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "senseway.toml"
    path.write_text(text)
    return path


def test_without_any_source_the_defaults_hold() -> None:
    assert load({}, environ={}) == Config()


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "[server]\nport = 1\nhost = 'file'\nmax_sessions = 7\n")
    environ = {"SENSEWAY_SERVER_PORT": "2", "SENSEWAY_SERVER_HOST": "environment"}
    server = load({"server.port": 3}, environ=environ, path=path).server
    assert (server.port, server.host, server.max_sessions) == (3, "environment", 7)


def test_the_environment_can_name_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "models = ['a', 'b']")
    assert load({}, environ={"SENSEWAY_CONFIG": str(path)}).models == ("a", "b")


def test_other_peoples_variables_are_left_alone() -> None:
    assert from_environment({"PATH": "/bin", "SENSEWAY_MODELS": "a, b"}) == {"models": "a, b"}


def test_a_list_in_a_variable_is_split_at_commas() -> None:
    assert load({}, environ={"SENSEWAY_MODELS": "a, b"}).models == ("a", "b")


def test_required_capabilities_are_capabilities(tmp_path: Path) -> None:
    path = written(tmp_path, "required_capabilities = ['word_times']")
    assert load({}, environ={}, path=path).required_capabilities == (Capability.WORD_TIMES,)


def test_the_detector_waits_as_long_as_the_protocol_says_unless_told_otherwise() -> None:
    assert Config().vad.hangover_ms == 400


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[server]\nprot = 1", "unknown key server.prot; known are models, required_capabilities"),
        ("prot = 1", "unknown key prot; known are models"),
        ("server = 1", "unknown key server;"),
        ("[server]\nport = 70000", "port is 70000; it must lie in 0..65535"),
        ("[server]\nport = 1.5", "server.port is 1.5; a whole number is needed"),
        ("[server]\nport = true", "server.port is True; a whole number is needed"),
        ("[server]\nhost = 1", "server.host is 1; text is needed"),
        ("[server]\nhost = ''", "host is empty"),
        ("[session]\nmax_unacked_s = nan", "max_unacked_s is nan; it must lie in 1..120 s"),
        ("[vad]\nthreshold = 2", "threshold is 2.0; it must lie in 0."),
        ("models = 5", "models is 5; a list is needed"),
        ("models = []", "models is empty"),
        ("models = ['a', 'a']", "models names one twice"),
        ("n_threads = -1", "n_threads is -1; it must lie in 0..1024"),
        ("required_capabilities = ['telepathy']", "'telepathy'; one of word_times, confidence"),
        ("models = ", "is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_what_is_accepted(tmp_path: Path, text: str, complaint: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as refusal:
        load({}, environ={}, path=path)
    assert complaint in str(refusal.value)
    assert f"file {path}" in str(refusal.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load({}, environ={}, path=tmp_path / "absent.toml")


def test_an_unknown_variable_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown variable SENSEWAY_PORT; known are .*SENSEWAY_SERVER_PORT"):
        load({}, environ={"SENSEWAY_PORT": "1"})


def test_a_wrong_variable_is_refused_with_its_key() -> None:
    with pytest.raises(ConfigError, match="environment: server.port is 'many'; a whole number is needed"):
        load({}, environ={"SENSEWAY_SERVER_PORT": "many"})


def test_two_settings_that_only_fit_together_are_checked_together() -> None:
    vad = merge({"file": {"vad.threshold": 0.3, "vad.negative_threshold": 0.2}}).vad
    assert (vad.threshold, vad.negative_threshold) == (0.3, 0.2)


def test_the_printed_configuration_reads_back_to_the_same(tmp_path: Path) -> None:
    flags = {"models": ["a", 'b"\\'], "server.port": 5, "required_capabilities": ["context"], "vad.threshold": 0.6}
    config = load(flags, environ={})
    assert load(read_toml(written(tmp_path, as_toml(config))), environ={}) == config


def test_every_key_has_a_variable_of_its_own() -> None:
    variables = [variable_of(key) for key in known_keys()]
    assert len(set(variables)) == len(variables)
