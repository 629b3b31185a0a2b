"""The stand-in's C++, compiled once.

Guarantee: the result lies in `build/` under a name made of the sources, the compiler's options and torch's version. It is whole
or not there, also when several processes want it at once; only one of them compiles. `python -m tests.gpu.stand_in.building`
does no more than compile.
"""

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_HERE = Path(__file__).parent
BUILT = Path(__file__).parents[3] / "build" / "stand-in"
COMPILER = os.environ.get("CXX", "g++")
_OPTIONS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-Wall", "-Werror")


def gpu_library() -> Path:
    """The library that makes `cuda` a device of torch. It is compiled in some ten seconds."""
    spec = importlib.util.find_spec("torch")  # importing it takes a second that only the first of all runs needs
    assert spec is not None
    assert spec.origin is not None
    torch = Path(spec.origin).parent
    includes = [f"-isystem{torch}/include", f"-isystem{torch}/include/torch/csrc/api/include"]
    links = [f"-L{torch}/lib", "-lc10", "-ltorch_cpu", "-ltorch", f"-Wl,-rpath,{torch}/lib"]
    version = importlib.metadata.version("torch")
    return _compiled("stand_in.cpp", "libstand_in_gpu.so", includes, links, facts=(str(torch), version))


def nvml_library() -> Path:
    """The library under whose name nvidia-ml-py looks for the driver."""
    return _compiled("nvml.cpp", "libnvidia-ml.so.1", [], ["-Wl,-soname,libnvidia-ml.so.1"])


def _compiled(source: str, name: str, includes: Sequence[str], links: Sequence[str], facts: Sequence[str] = ()) -> Path:
    command = [COMPILER, *_OPTIONS, *includes, str(_HERE / source), *links]
    read = [_HERE / source, *sorted(_HERE.glob("*.h"))]
    key = hashlib.sha256(b"\0".join([*(file.read_bytes() for file in read), *map(str.encode, [*command, *facts])]))
    library = BUILT / key.hexdigest()[:16] / name
    library.parent.mkdir(parents=True, exist_ok=True)
    with (library.parent / "lock").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=library.parent) as folder:
                made = Path(folder) / name
                done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, check=False)
                if done.returncode:
                    raise RuntimeError(f"{COMPILER} cannot compile {source}:\n{done.stderr[-4000:]}")
                made.rename(library)
    return library


if __name__ == "__main__":
    gpu_library()
    nvml_library()
