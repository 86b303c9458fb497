"""The plugin's contract with SGLang's sources, where they are: read, and not run, since SGLang needs a GPU."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from nondet.sglang import plugin
from scripts.vllm_seams import found_at, parameters

SPEC = importlib.util.find_spec("sglang")
SOURCES = Path(SPEC.origin or "").parent.parent if SPEC else Path("absent")
pytestmark = pytest.mark.skipif(not (SOURCES / "sglang" / "srt").is_dir(), reason="SGLang's sources are not installed")


def test_every_function_that_is_hooked_is_there() -> None:
    assert {path: parameters(SOURCES, path) for path in plugin.PATCHED} == plugin.PATCHED


def test_every_setting_that_is_refused_is_one_of_the_server_s() -> None:
    server = found_at(SOURCES, "sglang.srt.server_args:ServerArgs")
    assert isinstance(server, ast.ClassDef)
    fields = {
        one.target.id for one in server.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }
    wanted = {*plugin._NOT_COVERED.values(), *(f"{name}_size" for name in plugin._PARALLEL.values())}
    wanted |= {"attention_backend", "enable_deterministic_inference", "cuda_graph_config", "page_size"}
    assert wanted <= fields


def test_layers_that_coverage_knows_are_sglang_s() -> None:
    classes = {
        node.name
        for path in (SOURCES / "sglang" / "srt" / "layers").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    assert classes >= (plugin._ELEMENTWISE - plugin._TORCHS) | plugin._BY_METHOD
