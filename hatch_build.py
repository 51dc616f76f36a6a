"""Compiles the native forward into the wheel, so that it runs where there is no compiler.

There is one library for each of ``library.LEVELS``; see ``forethought/backends/cpu/library.py``.
Without a C++ compiler, or on other systems than Linux on x86-64, the wheel is pure Python; so are
editable installs, which compile at the first start.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeForwardHook(BuildHookInterface):
    """Adds the libraries to the wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile them.

        Args:
            version: "standard" or "editable".
            build_data: of the wheel; its platform and the files are added.
        """
        if version == "editable" or (sys.platform, platform.machine()) != ("linux", "x86_64"):
            return
        sys.path.insert(0, str(Path(self.root, "src")))
        from forethought.backends.cpu import library
        from forethought.errors import ModelError

        compiler = library.find_compiler()
        if compiler is None:
            self.app.display_warning(f"a wheel without the native forward: {library.NO_COMPILER}")
            return
        # It stays for the next call: pip builds the wheel once for its metadata and once more.
        directory = Path(self.root, "build", "prebuilt")
        directory.mkdir(parents=True, exist_ok=True)

        def compiled(level: library.Level) -> Path:
            path = directory / library.prebuilt_name(level)
            if not path.exists():
                with tempfile.TemporaryDirectory(dir=directory) as unfinished:
                    to = Path(unfinished, path.name)
                    library.compile_library(compiler, to, level.flags)
                    os.replace(to, path)
            return path

        try:
            with ThreadPoolExecutor() as pool:
                paths = list(pool.map(compiled, library.LEVELS))
        except ModelError as error:
            self.app.display_warning(f"a wheel without the native forward: {error.why}")
            return
        inside = library.PREBUILT.relative_to(Path(self.root, "src"))
        build_data["force_include"].update({str(path): str(inside / path.name) for path in paths})
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sys.platform}_{platform.machine()}"
