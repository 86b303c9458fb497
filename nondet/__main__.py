"""`python -m nondet`, and the console script. It imports little, so that Ctrl-C works before all other imports."""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # `python -m` looks for every module in the current folder first: a json.py or torch.py there is not ours
    del sys.path[0]

import atexit
import os
import signal
import threading

if __name__ == "__main__":
    # workers are separate processes, and find nondet by this; last, so that nothing there hides another module
    sys.path += [folder for folder in (os.path.dirname(os.path.dirname(__file__)),) if folder not in sys.path]

__all__ = ["leave", "main"]


def _end_now(number: int, frame: object) -> None:
    os.write(2, b"nondet: stopped\n")
    os._exit(130)


def leave(code: int) -> None:
    """End this process with the code, after the exit handlers, and without Python's own teardown where that is safe.
    Python would unload every module first, which takes half a second or more with torch."""
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    if "torch" not in sys.modules or not all(thread.daemon for thread in others):
        return  # Python waits for the threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            return  # Python reports the error
    os._exit(code)


def main() -> int:
    """Run the command, and end with its exit code or return it; see `nondet.cli.main`."""
    signal.signal(signal.SIGINT, _end_now)  # nothing is on disk yet, and an interrupted import prints a traceback
    from nondet.cli import main as run

    code = run()
    leave(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
