"""`python -m nondet`, and the console script. Light on purpose: Ctrl-C is answered before anything else is loaded."""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # `python -m` looks for every module in the current folder first: a json.py or torch.py lying there is not ours
    del sys.path[0]

import atexit
import os
import signal
import threading

if __name__ == "__main__":
    # workers are processes of their own, and find nondet by this; last, so that nothing there is taken for another's
    sys.path += [folder for folder in (os.path.dirname(os.path.dirname(__file__)),) if folder not in sys.path]

__all__ = ["leave", "main"]


def _end_now(number: int, frame: object) -> None:
    os.write(2, b"nondet: stopped\n")
    os._exit(130)


def leave(code: int) -> None:
    """End this process with the code, after what others want done at the end: whoever returns from here goes on to.

    Python would take every module apart first. Of torch that is half a second and more, and nobody needs it.
    """
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    if "torch" not in sys.modules or not all(thread.daemon for thread in others):
        return  # Python waits for the threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            return  # Python says what is wrong
    os._exit(code)


def main() -> int:
    """Run the command, and end with its exit code or return it; see `nondet.cli.main`."""
    signal.signal(signal.SIGINT, _end_now)  # nothing is on disk yet, and an import that is cut off is a traceback
    from nondet.cli import main as run

    code = run()
    leave(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
