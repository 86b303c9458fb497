"""`nondet fingerprint`: what one machine of a fleet computes, as digests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nondet.services import options as o
from nondet.services.run import Output, Request, Sink, pick_device

if TYPE_CHECKING:
    from nondet.core.records import Record


@dataclass(frozen=True, kw_only=True)
class FingerprintRequest(Request):
    """The options of `nondet fingerprint`."""

    name: str | None = o.own("What reports call this machine.", shown="its file's name")
    identify: bool = o.own("Record the host's name, and the GPU's UUID and serial number.", default=False)
    device: str = o.own("auto, cpu or cuda.", default="auto", panel=o.MACHINE, check=o.DEVICES)
    threads: int | None = o.own(
        "CPU threads. They change bits, so they are always recorded.", panel=o.MACHINE, check=o.THREAD_COUNTS
    )


def fingerprint(request: FingerprintRequest, sink: Sink) -> Path:
    """Write digests of fixed results, for `nondet fleet`. Exit 3: it disagrees with itself. Not run on a GPU yet."""
    output = Output(request, "fingerprint", sink)

    from nondet.core.runfile import read_run
    from nondet.fleet.collect import cases, completions, machine, measure

    device = pick_device(request.device, request.threads)
    planned = cases(device)
    plan = {"device": device, "name": request.name, "identify": request.identify, "cases": len(planned)}
    parts: list[Callable[[], Iterable[Record]]] = [*(partial(measure, case) for case in planned)]
    parts += [partial(completions, device), lambda: [machine(request.name or "", device, identify=request.identify)]]
    total = sum(len(case.calls) for case in planned) + 5
    with output.recording("fingerprint", plan, 0, total) as writer, sink.progress() as progress:
        task = progress.add_task("computing", total=len(parts))
        for part in parts:
            for record in part():
                if record.key not in writer.done:  # a resumed run computes all again, which takes seconds
                    writer.write(record)
            progress.update(task, advance=1)
    wrong = any(record.wrong for record in read_run(output.path).fingerprints)
    return output.present(code=3 if wrong else 0)
