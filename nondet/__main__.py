"""`python -m nondet`, and the console script. Light on purpose: Ctrl-C is answered before anything else is loaded."""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # `python -m` looks for every module in the current folder first: a json.py or torch.py lying there is not ours
    del sys.path[0]

import os
import signal

__all__ = ["main"]


def _end_now(number: int, frame: object) -> None:
    os.write(2, b"nondet: stopped\n")
    os._exit(130)


def main() -> int:
    """Run the command and return its exit code; see `nondet.cli.main`."""
    signal.signal(signal.SIGINT, _end_now)  # nothing is on disk yet, and an import that is cut off is a traceback
    from nondet.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
