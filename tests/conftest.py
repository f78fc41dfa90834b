"""What holds for every test: no property has a time limit, and a summary says what was skipped and why."""

from collections import defaultdict

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes is the machine's affair, and it may have other things to do.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The reasons for which tests were skipped, and in which files, each reason once."""
    paths = defaultdict(list)
    for report in terminalreporter.stats.get("skipped", []):
        path, _, reason = report.longrepr
        paths[reason.removeprefix("Skipped: ")].append(report.nodeid.partition("::")[0] or path)
    if paths:
        terminalreporter.section("skipped")
    for reason, skipped in sorted(paths.items()):
        terminalreporter.line(f"{len(skipped)} skipped: {reason}")
        for path in sorted(set(skipped)):
            terminalreporter.line(f"    {skipped.count(path):3} {path}")
