"""nondet's kernels under SGLang, through its entry point `sglang.srt.plugins`; the user's guide is docs/engines.md.

Importing this package imports neither torch nor SGLang. SGLang calls `plugin` in each of its processes; with
NONDET_BATCH_INVARIANT=1 that loads `attention`.
"""

import logging

BACKEND = "nondet"  # of attention, as --attention-backend names it


def log(text: str) -> None:
    """A line of SGLang's log."""
    logging.getLogger("sglang.nondet").info("nondet: %s", text)
