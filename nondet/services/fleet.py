"""`nondet fingerprint`: what one machine of a fleet computes, as digests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nondet.errors import UserError
from nondet.services import options as o
from nondet.services.run import Output, Request, Sink, pick_device

_NAME_MOST = 120


@dataclass(frozen=True, kw_only=True)
class FingerprintRequest(Request):
    """The options of `nondet fingerprint`."""

    name: str | None = o.own("What reports call this machine.", shown="its file's name, or with --identify the host's")
    identify: bool = o.own("Record the host's name, and the GPU's UUID and serial number.", default=False)
    device: str = o.own("auto, cpu or cuda.", default="auto", panel=o.MACHINE, check=o.DEVICES)
    threads: int | None = o.own(
        "CPU threads. They change bits, so they are always recorded.", panel=o.MACHINE, check=o.THREAD_COUNTS
    )

    def _check(self) -> None:
        if self.name is not None and not 0 < len(self.name.strip()) <= _NAME_MOST:
            raise UserError(f"--name of {len(self.name):,} characters", f"Give 1 to {_NAME_MOST}.")


def fingerprint(request: FingerprintRequest, sink: Sink) -> Path:
    """Write digests of fixed computations on this machine, for `nondet fleet`. Exit 3: it disagrees with itself."""
    output = Output(request, "fingerprint", sink)

    from nondet.fleet.collect import cases, completions, machine, measure

    device = pick_device(request.device, request.threads)
    planned = cases(device)
    plan = {"device": device, "name": request.name, "identify": request.identify, "cases": len(planned)}
    disagrees = False
    with output.recording("fingerprint", plan, 0, 2 * len(planned) + 5) as writer, sink.progress() as progress:
        task = progress.add_task("computing", total=len(planned) + 1)
        for case in planned:
            if not all(case.record(impl).key in writer.done for impl in ("invariant", "stock")):
                for record in measure(case):
                    disagrees |= writer.write(record).wrong
            progress.update(task, advance=1)
        for record in completions(device):
            disagrees |= record.wrong
            if record.key not in writer.done:
                writer.write(record)
        seen = machine(request.name or "", device, identify=request.identify)
        if seen.key not in writer.done:
            writer.write(seen)
    return output.present(code=3 if disagrees else 0)
