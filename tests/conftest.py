"""Shared by all tests: without a GPU, Triton kernels run in Triton's interpreter and `gpu` tests are skipped."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import importlib.util
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Nothing that a test proves belongs into the user's own cache of certificates. The folder of the process that starts
# workers is theirs as well, and that of processes that tests start: a thing is proven once.
os.environ["NONDET_CACHE"] = (
    os.environ["NONDET_CACHE"] if "PYTEST_XDIST_WORKER" in os.environ else tempfile.mkdtemp(prefix="nondet-tests-")
)
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command does, before torch is loaded: see nondet.cli.main

import pytest
import torch

if importlib.util.find_spec("sniffio") is None:
    sys.modules["sniffio"] = None  # type: ignore[assignment] # else httpcore searches the path for it at each request

gc.disable()  # what is loaded and collected stays, and to look at it again and again takes a quarter of that time
torch.set_num_threads(1)  # what a module's or a session's fixture computes, too
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel module is imported, so it has to be set before


def pytest_configure(config: pytest.Config) -> None:
    """Because we ship a plugin, pytest would rewrite the asserts of all our modules, which costs seconds a process.
    What Python compiles instead is also what the processes that tests start load."""
    hook: Any = config.pluginmanager.rewrite_hook
    if hasattr(hook, "_must_rewrite"):  # not with --assert=plain
        hook._must_rewrite.discard("nondet")
        hook._marked_for_rewrite_cache.clear()


def pytest_sessionfinish() -> None:
    """Nothing of ours stays in the temporary folder, and what was set apart from the collector is its again."""
    gc.unfreeze()
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ["NONDET_CACHE"], ignore_errors=True)


def pytest_collection(session: pytest.Session) -> None:
    """Every other worker of a whole run loads the tests from their end: two compile a half of a fresh clone each."""
    whole = [Path(path).name for path in session.config.args] == ["tests"]
    if not whole or os.environ.get("PYTEST_XDIST_WORKER", "gw0")[-1] not in "13579":
        return
    for path in sorted(Path(__file__).parent.rglob("test_*.py"), reverse=True):
        with contextlib.suppress(Exception, pytest.skip.Exception):  # which is told where the file is collected
            importlib.import_module(".".join(path.relative_to(session.config.rootpath).with_suffix("").parts))


@pytest.hookimpl(trylast=True)  # after -m has made its choice
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave `nightly` tests out unless -m names them, and skip tests that only a GPU can answer, with the reason."""
    if "nightly" not in config.option.markexpr and not os.environ.get("NONDET_ALL_TESTS"):
        nightly = [item for item in items if "nightly" in item.keywords]
        config.hook.pytest_deselected(items=nightly)
        items[:] = [item for item in items if "nightly" not in item.keywords]
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


_over = math.inf


def pytest_collection_finish() -> None:
    """A quick run (scripts/test.sh --quick) names the seconds that its tests may take: from here on."""
    global _over
    gc.enable()
    _over = time.monotonic() + float(os.environ.get("NONDET_QUICK", "inf"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a quick run did not reach is counted."""
    if time.monotonic() > _over:
        pytest.skip("the time of a quick run is over")


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter() -> None:
    """Spare Triton's interpreter most of its time: it replaces its language at each call of one kernel by another,
    makes every shape and type anew, and checks integers for an overflow that it then keeps to itself.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        return
    language, core, patch_lang = interpreter.tl, interpreter.tl.core, interpreter._patch_lang

    @functools.cache
    def languages(function: Any) -> list[Any]:
        return [one for one in (language, core) if any(value is one for value in function.__globals__.values())]

    def patch(function: Any) -> Any:
        replaced = not any(core.is_builtin(one.load) for one in languages(function))  # a kernel calls another
        return interpreter._LangPatchScope() if replaced else patch_lang(function)

    interpreter._patch_lang = patch
    builder = interpreter.interpreter_builder
    if hasattr(builder.options, "sanitize_overflow"):
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    _remember_parts(core.tensor, ("handle", "type"), lambda handle, kind: kind.name)
    sizes = lambda kind, shape: (kind.name, *(getattr(size, "value", size) for size in shape))  # noqa: E731 - a key
    _remember_parts(core.block_type, ("element_ty",), sizes)


def _remember_parts(cls: Any, given: tuple[str, ...], key_of: Callable[..., Any]) -> None:
    """Make what an instance is made of, but for what is `given`, once for each key of its arguments."""
    make, known = cls.__init__, dict[Any, dict[str, Any]]()

    def quick(self: Any, *arguments: Any) -> None:
        key = key_of(*arguments)
        if key in known:
            vars(self).update(known[key])
        else:
            make(self, *arguments)
            known[key] = {name: part for name, part in vars(self).items() if name not in given}
        vars(self).update(zip(given, arguments, strict=False))

    cls.__init__ = quick


_frozen: tuple[object, int] | None = None


@pytest.fixture(autouse=True)
def _cheap_collections(request: pytest.FixtureRequest) -> None:
    """transformers' engine collects garbage twice a session, half a second each: what is alive is set apart before."""
    global _frozen
    if _frozen != (now := (request.module, len(sys.modules))):
        gc.freeze()
        _frozen = now


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tests share the machine, threads on shared cores wait longer than they compute, and their count changes bits."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NONDET_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> int:
    torch.set_num_threads(request.param)  # `one_thread` puts it back
    count: int = request.param
    return count


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """A test draws the same numbers whichever ran before it: some differences in bits are matters of chance."""
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    torch.default_generator.manual_seed(0)  # torch.manual_seed writes a stack trace down for CUDA, at each call


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    from nondet.cli import main

    monkeypatch.chdir(tmp_path)

    def call(*argv: object) -> tuple[int, str, str]:
        code = main([str(a) for a in argv])
        seen = capsys.readouterr()
        # not what is said before the work: whichever test is the first loads torch, and of an endpoint its address
        return code, seen.out, re.sub(r"^(loading torch|connecting to .*) \.\.\.\n", "", seen.err, flags=re.MULTILINE)

    return call


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.sampling.conftest import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def stock_fp8() -> None:
    """Skip where torch has no product of FP8 operands. With AVX-512 hidden by ONEDNN_MAX_CPU_ISA, torch asks oneDNN for
    what is hidden, and is refused: not at once, but once something (here the question about AMX, else a float16
    product) has had it look at what the CPU really has."""
    from nondet.kernels import stock

    torch.cpu._is_amx_tile_supported()
    x, scale = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(())
    try:
        stock.scaled_matmul(x, x.T, scale, scale, torch.float32)
    except NotImplementedError as refused:
        pytest.skip(str(refused))


@pytest.fixture
def kept() -> Any:
    from nondet.core.certificates import Certificates

    return Certificates({"device": "cpu"}, None)


@pytest.fixture
def chained_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter's tl.dot one chain over K, as the GPU's is; without an interpreter this does nothing. Left
    alone it calls NumPy's matmul, whose bits depend on the number of rows and on a row's place among them. With a
    chain, what is left to break an invariance is the kernel's own logic."""
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, *unused: Any) -> Any:
        total = d.data.copy()
        left, right = a.data.astype(total.dtype), b.data.astype(total.dtype)
        for k in range(left.shape[-1]):
            total += left[:, k : k + 1] * right[k : k + 1]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    # Triton 3.6 holds a number that a kernel computed, as a loop's bound, in an array of one element, and says
    # `int(array)`, which NumPy refuses since 2.5; Triton 3.9 squeezes it first
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
