"""Maps the repository's folders to packages and builds the CPU kernels.

`srt/`, `lang/` and `kernels/` are installed as `sapwood.srt`, `sapwood.lang` and `sapwood.kernels`.
The extension is optional: the language and the docs install without a compiler, and `sapwood serve`
says what is missing; SAPWOOD_NO_EXTENSION=1 leaves it out. Each instruction set is one source file with
flags of its own; which one runs is chosen at run time.
"""

import os
import platform
from pathlib import Path

from setuptools import find_packages, setup

try:
    from pybind11.setup_helpers import Pybind11Extension, build_ext
except ImportError:  # a build without isolation and without pybind11: everything but the kernels
    Pybind11Extension, build_ext = None, None

FOLDERS = {"sapwood.srt": "srt", "sapwood.lang": "lang", "sapwood.kernels": "kernels"}
X86 = platform.machine().lower() in ("x86_64", "amd64")
ISA_FLAGS = {
    "isa_avx2": ["-mavx2", "-mfma", "-mf16c"],
    "isa_avx512": [
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mavx2", "-mfma", "-mf16c"),
        # GCC 12 warns of its own AVX-512 header, some two thousand lines.
        *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),
    ],
}


def packages() -> list[str]:
    found = ["sapwood"]
    for name, folder in FOLDERS.items():
        found += [name, *(f"{name}.{sub}" for sub in find_packages(folder))]
    return found


def extensions() -> list:
    sources = [s for s in sorted(Path("kernels/csrc").glob("*.cpp")) if X86 or s.stem not in ISA_FLAGS]
    if Pybind11Extension is None or not sources or os.environ.get("SAPWOOD_NO_EXTENSION"):
        return []
    ext = Pybind11Extension(
        "sapwood.kernels._C",
        [str(s) for s in sources],
        cxx_std=17,
        depends=[str(h) for h in sorted(Path("kernels/csrc").glob("*.hpp"))],
        extra_compile_args=["-O3", "-ffp-contract=off", "-pthread", "-fno-math-errno"],
        extra_link_args=["-pthread"],
        define_macros=[("SAPWOOD_X86", "1" if X86 else "0")],
    )
    ext.optional = True
    return [ext]


def commands() -> dict:
    if build_ext is None:
        return {}

    class build_kernels(build_ext):
        """Adds the flags of one instruction set to the one file that is written for it."""

        def build_extensions(self) -> None:
            compile_one = self.compiler._compile

            def compile_for_isa(obj, src, ext, cc_args, extra, pp_opts):
                flags = ISA_FLAGS.get(Path(src).stem, [])
                return compile_one(obj, src, ext, cc_args, [*extra, *flags], pp_opts)

            self.compiler._compile = compile_for_isa
            super().build_extensions()

    return {"build_ext": build_kernels}


setup(
    packages=packages(),
    package_dir={"sapwood": "sapwood", **FOLDERS},
    package_data={"sapwood": ["py.typed"], "sapwood.kernels": ["csrc/*"]},
    ext_modules=extensions(),
    cmdclass=commands(),
)
