"""`nondet certify`, and what it has kept already."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from nondet.commands.output import Terminal, command_of, put, say
from nondet.errors import one_line
from nondet.services import certify as service
from nondet.services.certify import CertifyRequest
from nondet.services.run import pick_device

if TYPE_CHECKING:
    from nondet.core.certificates import Certificates


def _certify(request: CertifyRequest, sink: Terminal) -> None:
    if not request.show and not request.forget:
        service.certify(request, sink)
        return
    from nondet.core.certificates import certificates

    kept = certificates(pick_device(request.device, request.threads))
    if request.forget:
        _forget(kept)
    else:
        _print_standing(kept, as_json=sink.as_json)


_certify.__doc__ = service.certify.__doc__
certify = command_of(_certify)


def _forget(kept: Certificates) -> None:
    """Delete what is kept for this machine; a `UserError` where that can't be."""
    from nondet.core.runfile import disk_errors

    with disk_errors(kept.path or Path(), "Check who owns the folder, or set NONDET_CACHE."):
        gone = kept.path is not None and kept.path.is_file()
        if kept.path is not None:
            kept.path.unlink(missing_ok=True)
    say(f"deleted {kept.path}" if gone else "no certificates are kept for this machine and toolchain")


def _print_standing(kept: Certificates, *, as_json: bool) -> None:
    """What is kept for this machine."""
    if as_json:
        import msgspec

        listing = {
            "machine": kept.machine,
            "described": kept.described,
            "path": str(kept.path),
            "certificates": [msgspec.to_builtins(c) for c in kept.all()],
        }
        put([json.dumps(listing)], as_json=True)
        return

    facts = ", ".join(
        f"{k} {v}" for k, v in kept.described.items() if isinstance(v, str | int | float) and k != "device"
    )
    lines = [f"This machine ({kept.machine}): {facts}"]
    for title, wanted in (("standing", True), ("excluded", False)):
        proofs = [c for c in kept.all() if c.holds == wanted]
        lines.append(f"{title}: {len(proofs) or 'none'}")
        lines += [f"  {proof.member}  {proof.key}  {proof.evidence}  {proof.proven[:10]}" for proof in proofs]
    put(map(one_line, lines))
