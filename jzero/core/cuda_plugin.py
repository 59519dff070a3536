"""JAX's CUDA plugin on a machine without a GPU: hidden from programs that use no pod, started for those that do.

JAX starts every plugin that is installed. Without a CUDA driver this one can only compile for pods, and every program
would print two dozen lines of traceback and the plugin's C++ log. `hide` puts a small module in its place, which starts
it (`start`) when a topology is asked for: by `jzero.pod`, or by `get_topology_desc(platform="cuda")` of
`jax.experimental.topologies`. A machine with a driver is left alone, and so is JAX_PLATFORMS=cuda.

On jax 0.10 `import jax` itself loads libraries of the plugin, which log six lines. A program that imports jax first
sees them. QR and eigenvalues do not compile without these libraries, so the extra `pod` needs them.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import sys
import tempfile
import types
from collections.abc import Iterator

NAMES = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
SKIP_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
HIDDEN = "hidden by jzero until a topology is asked for: this machine has no CUDA driver"


def hide() -> None:
    """Lets JAX find a plugin that starts when it is needed, unless it is loaded, asked for, or has a driver here."""
    wanted = os.environ.get("JAX_PLATFORMS", "")
    if "cuda" in wanted or "gpu" in wanted or has_driver():
        return
    for name in NAMES:
        if name not in sys.modules and _installed(name):
            hidden = types.ModuleType(name, HIDDEN)
            hidden.initialize = _start_when_asked  # pyright: ignore[reportAttributeAccessIssue]
            sys.modules[name] = hidden
            if "jax" not in sys.modules:
                with _quiet():
                    importlib.import_module("jax")


def start() -> bool:
    """Registers the plugin with JAX, without the CUDA libraries, which no compile needs; False if it is missing."""
    for name in NAMES:
        if getattr(sys.modules.get(name), "__doc__", None) == HIDDEN:
            del sys.modules[name]
        if _installed(name):
            with without_cuda_libraries(), _quiet():
                importlib.import_module(name).initialize()
            return True
    return False


def _start_when_asked() -> None:
    """What JAX calls in place of the plugin's `initialize`: the first request for a topology starts the plugin."""
    from jax._src import xla_bridge

    factories: dict = xla_bridge._topology_factories

    def topology(*args, **kwargs):
        del factories["cuda"]  # replaced by the plugin; if that does not register, JAX says so as it always does
        xla_bridge._backend_lock.release()  # JAX holds it while it makes a topology; registering a plugin takes it
        try:
            start()
        finally:
            xla_bridge._backend_lock.acquire()
        if "cuda" not in factories:
            raise NotImplementedError("topology not implemented for cuda")
        return factories["cuda"](*args, **kwargs)

    factories.setdefault("cuda", topology)


def has_driver() -> bool:
    """True if the CUDA driver can be loaded, which every program on a GPU needs."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@contextlib.contextmanager
def without_cuda_libraries() -> Iterator[None]:
    """Lets the plugin start without a GPU, where it would ask for cuDNN, which a compile does not need."""
    if has_driver() or SKIP_CHECK in os.environ:
        yield
        return
    os.environ[SKIP_CHECK] = "1"
    try:
        yield
    finally:
        del os.environ[SKIP_CHECK]


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # no such package, or a module without a spec
        return False


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Holds back what C++ libraries write to file descriptor 2 while they load; on an error it is shown."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        try:
            yield
        except BaseException:
            log.seek(0)
            os.write(kept, log.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
