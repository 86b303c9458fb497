"""Real servers, started by the scripts that users start them with, ended after the last test that asks them.

They are not part of a usual run: environments of several GB, minutes to start. By hand:

    pytest -m llamacpp tests/servers                     # sets up and starts what is missing
    NONDET_VLLM_URL=http://127.0.0.1:8000 pytest tests/servers
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVERS = Path(os.environ.get("NONDET_SERVERS", Path.home() / ".cache" / "nondet-servers"))


@dataclass(frozen=True)
class Real:
    """One kind of server.

    Attributes:
        marker: The test marker, and what its tests are run by.
        name: In the name of its script and of the variable that holds its URL.
        model: What it calls the embedded model.
    """

    marker: str
    name: str
    model: str

    @property
    def url(self) -> str:
        """Of a server that runs already; "" if none was named."""
        return os.environ.get(f"NONDET_{self.name.upper()}_URL", "")

    def script(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Run its script."""
        return subprocess.run(
            ["bash", f"scripts/serve_{self.name}.sh", *options],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )


REAL = {
    "vllm": Real("vllm", "vllm", "nondet-embedded"),
    "llamacpp": Real("llamacpp", "llamacpp", "nondet-embedded"),
    "transformers": Real("transformers_serve", "transformers", str(SERVERS / "nondet-embedded")),
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what asks a server, unless it is asked for by its marker or its server is named."""
    chosen = config.getoption("-m")
    for item in items:
        for server in REAL.values():
            if item.get_closest_marker(server.marker) and server.marker not in chosen and not server.url:
                reason = f"asks a real server: pytest -m {server.marker}, or set NONDET_{server.name.upper()}_URL"
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
