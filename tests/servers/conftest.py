"""Real servers, started by the scripts that users start them with, ended after the last test that asks them.

They are not part of a usual run: environments of several GB, minutes to start. By hand:

    pytest -m llamacpp tests/servers                     # sets up and starts what is missing
    NONDET_VLLM_URL=http://127.0.0.1:8000 pytest tests/servers
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVERS = Path(os.environ.get("NONDET_SERVERS", Path.home() / ".cache" / "nondet-servers"))


class Real(NamedTuple):
    """One kind of server."""

    marker: str  # of its tests, and what they are run by
    name: str  # in the name of its script and of the variable that holds its URL
    model: str  # what it calls the embedded model

    @property
    def url(self) -> str:
        return os.environ.get(f"NONDET_{self.name.upper()}_URL", "")

    def script(self, *options: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", f"scripts/serve_{self.name}.sh", *options]
        return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)


REAL = {
    "vllm": Real("vllm", "vllm", "nondet-embedded"),
    "llamacpp": Real("llamacpp", "llamacpp", "nondet-embedded"),
    "transformers": Real("transformers_serve", "transformers", str(SERVERS / "nondet-embedded")),
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what asks a server, unless it is asked for by its marker or its server is named."""
    for server in REAL.values():
        if server.url or server.marker in config.getoption("-m"):
            continue
        reason = f"asks a real server: pytest -m {server.marker}, or set NONDET_{server.name.upper()}_URL"
        for item in items:
            if item.get_closest_marker(server.marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[tuple[Real, str]]:
    """The server of the parameter's name and its URL; ended at the end if it did not run before."""
    real = REAL[request.param]
    if real.url:
        yield real, real.url
        return
    ran = real.script("--url").returncode == 0
    started = real.script()
    if started.returncode != 0:
        pytest.fail(f"scripts/serve_{real.name}.sh ended with {started.returncode}")
    try:
        yield real, started.stdout.splitlines()[-1]
    finally:
        if not ran:
            real.script("--stop")
