"""Untrusted text can't act on a terminal or a page."""

from __future__ import annotations

from nondet.errors import no_commands, one_line, printable


def test_what_acts_becomes_visible() -> None:
    for hostile, shown in [
        ("\x1b[31mred\x1b[0m", "␛[31mred␛[0m"),
        ("\x1b]0;title\x07", "␛]0;title␇"),
        ("a\x00b\x7fc", "a␀b␡c"),
        ("\x9b31m", "\ufffd31m"),
        ("safe\u202egnp.exe", "safe\ufffdgnp.exe"),
        ("zero\u200bwidth\ufeff", "zero\ufffdwidth\ufffd"),
        ("\ud800", "\ufffd"),
        ("line\u2028break", "line\ufffdbreak"),
        ("no\ufffecharacter\uffff \U0001fffe", "no\ufffdcharacter\ufffd \ufffd"),
        *[("Grüße,\n\tनमस्ते, 你好, العربية, 👩‍💻",) * 2],  # text, not control
    ]:
        assert printable(hostile) == shown
    assert one_line("a\nb\r\nc") == "a b␍ c"  # a message stays on one line whatever it quotes, and short
    assert len(one_line("x" * 5000, limit=100)) == 100
    # GitHub reads `::error` at a line's beginning and `##[` anywhere; Azure `##vso[`; nothing else changes
    for hostile, shown in [
        ("::error::x", ": :error::x"),
        ("a\n \t\u3000::set-output name=a::b", "a\n \t\u3000: :set-output name=a::b"),
        ("a ##[error]b ##vso[task.x]c", "a ## [error]b ## vso[task.x]c"),
        ("at::native::mm a:: b\nc ::d # [ ##", "at::native::mm a:: b\nc ::d # [ ##"),
    ]:
        assert no_commands(hostile) == shown
