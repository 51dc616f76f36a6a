"""Say what this machine has: versions, processor, GPU, the extras that are installed, the embedded
models, which of the engine's fast paths are used here, and how programs that a model writes are
isolated. With --model: what that model is.

Works without torch, and says what is unknown then.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from forethought import __version__, assets
from forethought.cli import machine
from forethought.config.generation_config import described
from forethought.config.quantization import QUANTIZATIONS
from forethought.errors import ParameterError
from forethought.evaluation.report import count_of
from forethought.sandbox.sandbox import SAFE, why_not

_SHOWN = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic")
_NOT_FOR_USERS = ("dev", "docs")
"""Extras for work on forethought itself."""
_FIELDS = ("dtype", "quantization", "layer_window", "device")
"""Options that are fields of ``LlmArgs``, of the model."""
_DTYPES = ("bfloat16", "float16", "float32")
_MEMORY = {
    "libraries": "Python, torch and the rest of the process, before the model is loaded",
    "weights": "as they are held, with embeddings",
    "in_file": "of the disk, not the memory: layers that every step reads",
    "kv_cache": "of all pages; a page is taken of the system when it is first written",
    "states": "of recurrent layers, at most, beside the two of each sequence that runs",
    "loaded": "resident after the first token",
    "peak": "most that was ever resident",
}
"""Part of the memory -> what it is."""
_NATIVE_REASON = "the model's layers, this processor and the library in C++ allow it"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument(
        "--model",
        metavar="DIR|ID",
        help="load a model, and say how it is to be used (thoughts, sampling defaults, calls of "
        "tools, drafters inside), which forward runs, and what it takes of the memory",
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="of its weights")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="store them in few bits")
    parser.add_argument(
        "--layer-window", type=int, metavar="K", help="layers in memory, the others in a file"
    )
    parser.add_argument("--device", help="cpu, cuda, ...")


def run(args: argparse.Namespace) -> int:
    """Examine the machine and print the result."""
    if args.model is not None:
        return _print_model(args)
    for name in _FIELDS:
        if getattr(args, name) is not None:
            option = name.replace("_", "-")
            raise ParameterError(f"--{option} is of a model", "there is no --model", "Name a model")
    facts = examine()
    print(json.dumps(facts, ensure_ascii=False) if args.json else "\n".join(lines(facts)))
    return 0


def _print_model(args: argparse.Namespace) -> int:
    names = ("model", *_FIELDS)
    fields = {name: value for name in names if (value := getattr(args, name)) is not None}
    facts = examine_model(fields)
    print(json.dumps(facts, ensure_ascii=False) if args.json else "\n".join(model_lines(facts)))
    return 0


def examine_model(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What a model is, that is loaded by fields of ``LlmArgs``: its profile, the forward that runs,
    the drafters in use, and bytes of ``_MEMORY``, None where the system does not say. Raises as
    ``LLM``.
    """
    from forethought import LLM, SamplingParams

    before = machine.resident_bytes()
    with LLM(**fields) as llm:
        llm.generate([[0]], SamplingParams(max_tokens=1, temperature=0.0))
        frontend = llm.lend("doctor")
        llm.take_back()
        engine = frontend.local_engine
        runner, window = engine.runner, engine.runner.lm.layer_window
        return {
            "model": str(fields["model"]),
            "profile": llm.profile.to_dict(),
            "forward": {"path": runner.lm.path.kind, "reason": runner.lm.path.reason},
            "drafters_in_use": dict(engine.stats.draft_paths),
            "memory": {
                "libraries": before,
                "weights": runner.lm.weight_bytes,
                "in_file": 0 if window is None else window.file_bytes,
                "kv_cache": runner.storage.num_pages * runner.storage.bytes_per_page,
                "states": runner.storage.max_state_bytes,
                "loaded": machine.resident_bytes(),
                "peak": machine.peak_bytes(),
            },
        }


def model_lines(facts: Mapping[str, Any]) -> list[str]:
    """What a model is, for people."""
    profile, forward, drafters = facts["profile"], facts["forward"], facts["drafters_in_use"]
    shown = {
        "thoughts": _thought_line(profile),
        "answer": profile["answer"],
        "sampling": _sampling_line(profile),
        "calls of tools": _tools_line(profile),
        "drafters inside": "; ".join(_drafters_inside(profile, drafters)) or "none",
        "forward": f"{forward['path']}: {forward['reason'] or _NATIVE_REASON}",
    }
    lines_of_memory = []
    for name, num_bytes in facts["memory"].items():
        size = "unknown" if num_bytes is None else f"{num_bytes / 2**20:.0f} MiB"
        lines_of_memory.append(f"  {name:<10}{size:>13}  {_MEMORY[name]}")
    width = max(map(len, shown)) + 2
    rows = [f"  {name:<{width}}{value}" for name, value in shown.items()]
    return [facts["model"], *rows, "", "memory", *lines_of_memory]


def _tools_line(profile: Mapping[str, Any]) -> str:
    if profile["tool_format"] is None:
        return "as the tokenizer's response template says"
    place = "the chat template" if profile["describes_tools"] else "a system message"
    return f"{profile['tool_format']}; {place} describes the tools"


def _thought_line(profile: Mapping[str, Any]) -> str:
    if not profile["thinks"]:
        return "none"
    start, end = profile["thinking_markers"]
    opener = "the chat template opens one" if profile["opens_thought"] else "the model opens one"
    switch = profile["thinking_switch"]
    asked = f"; chat_template_kwargs has {switch}" if switch else ""
    return f"between {start} and {end}; {opener}{asked}"


def _sampling_line(profile: Mapping[str, Any]) -> str:
    """The sampling defaults of ``chat`` and of the server."""
    ignored = profile["sampling_not_honoured"]
    no_effect = f" (without effect here: {', '.join(ignored)})" if ignored else ""
    return described(profile["sampling"]) + no_effect


def _drafters_inside(profile: Mapping[str, Any], in_use: Mapping[str, str]) -> list[str]:
    return [
        f"{name}, {'in use' if name in in_use else 'not usable here'}: {words}"
        for name, words in profile["drafters"].items()
    ]


def examine() -> dict[str, Any]:
    """Everything, in plain values; ``torch`` is None where torch cannot be imported."""
    return {
        "versions": {"forethought": __version__, "python": platform.python_version()}
        | {name: version for name in _SHOWN if (version := _version(name)) is not None},
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "executable": sys.executable,
        "processor": {
            "name": machine.processor_name(),
            "cores": machine.num_cores(),
            "instruction_sets": machine.instruction_sets(),
        },
        "extras": missing_by_extra(),
        "embedded_models": {name: assets.embedded_dir(name).is_dir() for name in assets.names()},
        "sandbox": {kind: why_not(kind) for kind in SAFE},
        **_torch_facts(),
    }


def missing_by_extra() -> dict[str, list[str]] | None:
    """Extra -> those of its packages that are not installed; None if forethought itself is not."""
    try:
        required = metadata.requires("forethought") or []
    except metadata.PackageNotFoundError:
        return None
    by_extra: dict[str, list[str]] = {}
    for requirement in required:
        name = re.match(r"[\w.-]+", requirement)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        if name is None or extra is None or extra[1] in _NOT_FOR_USERS:
            continue
        missing = by_extra.setdefault(extra[1], [])
        if _version(name[0]) is None:
            missing.append(name[0])
    return by_extra


def lines(facts: dict[str, Any]) -> list[str]:
    """For people."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    processor, torch = facts["processor"], facts["torch"]
    sets = ", ".join(processor["instruction_sets"]) or "unknown"
    shown = {
        "versions": versions,
        "system": f"{facts['system']}; {facts['executable']}",
        "processor": f"{processor['name']}, {count_of(processor['cores'], 'core')}",
        "instruction sets": sets,
        "torch": facts["torch_error"] if torch is None else _torch_line(torch),
        "GPU": "unknown without torch" if torch is None else ", ".join(torch["gpus"]) or "none",
        "sandbox": _sandbox_line(facts["sandbox"]),
    }
    width = max(map(len, shown)) + 2
    return [
        *(f"{name:<{width}}{value}" for name, value in shown.items()),
        "",
        "extras",
        *_extra_lines(facts["extras"]),
        "",
        "embedded models",
        *(
            f"  {name:<22}{'ready' if there else 'missing: install forethought again'}"
            for name, there in facts["embedded_models"].items()
        ),
        "",
        "fast paths",
        *_path_lines(facts["fast_paths"]),
    ]


def _torch_line(torch: dict[str, Any]) -> str:
    return (
        f"{count_of(torch['threads'], 'thread')} (OMP_NUM_THREADS sets them), "
        f"kernels for {torch['kernels']}"
    )


def _sandbox_line(kinds: dict[str, str | None]) -> str:
    """The kind of isolation that a program gets, and why not a better one."""
    working = [kind for kind, why in kinds.items() if why is None]
    missing = [f"no {kind}: {why}" for kind, why in kinds.items() if why is not None]
    if working[:1] == [*kinds][:1]:
        return working[0]
    return "; ".join([*(working[:1] or ["none: programs run only with --unsafe-code"]), *missing])


def _extra_lines(extras: dict[str, list[str]] | None) -> list[str]:
    if extras is None:
        return ["  unknown: forethought is run from its source and is not installed"]
    width = max(map(len, extras), default=0) + 2
    lines_of_extras = []
    for extra, missing in extras.items():
        state = "installed"
        if missing:
            state = f'missing {", ".join(missing)}: pip install "forethought[{extra}]"'
        lines_of_extras.append(f"  {extra:<{width}}{state}")
    return lines_of_extras


def _path_lines(paths: dict[str, str] | None) -> list[str]:
    if paths is None:
        return ["  unknown without torch"]
    width = max(map(len, paths)) + 2
    return [f"  {name:<{width}}{value}" for name, value in paths.items()]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _torch_facts() -> dict[str, Any]:
    """Facts of torch and the engine's fast paths; None where torch cannot be imported."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:  # OSError: a library that it needs is broken
        reason = f"torch cannot be imported: {_first_line(error)}"
        return {"torch": None, "torch_error": reason, "fast_paths": None}
    facts = {
        "threads": torch.get_num_threads(),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "gpus": [_gpu(torch, i) for i in range(torch.cuda.device_count())],
    }
    try:
        paths = _fast_paths(torch)
    except (ImportError, OSError) as error:
        paths = {"unknown": f"the engine cannot be imported: {_first_line(error)}"}
    return {"torch": facts, "fast_paths": paths}


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _gpu(torch: Any, number: int) -> str:
    facts = torch.cuda.get_device_properties(number)
    return f"{facts.name} ({facts.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda})"


def _fast_paths(torch: Any) -> dict[str, str]:
    """The engine's kernels on this machine, as the engine itself chooses them."""
    from forethought.model.attention.sdpa import MIN_QUERIES
    from forethought.model.llama.layers import PackedProjection, projection

    paths = {}
    for name in _DTYPES:
        layer = projection(torch.zeros(64, 64, dtype=getattr(torch, name)))
        packed = isinstance(layer, PackedProjection)
        paths[f"linear layers, {name}"] = (
            "oneDNN, weights packed and activations fused" if packed else "torch's own product"
        )
    paths["layers on the processor"] = _native()
    paths["attention, 16 bits"] = _attention(MIN_QUERIES)
    paths["batch invariance"] = _invariance(MIN_QUERIES)
    paths["CUDA"] = _cuda(torch)
    return paths


def _native() -> str:
    """Whether the forward in C++ is prebuilt, or can be compiled and has been."""
    from forethought.backends.cpu import library
    from forethought.backends.cpu.cache import cache_directories

    native = "native forward, also of draft heads"
    if (prebuilt := library.prebuilt_path()) is not None:
        return f"{native}: prebuilt, {prebuilt}"
    compiler = library.find_compiler()
    if compiler is None:
        return f"torch, 2 to 3 times slower than the native forward: {library.NO_COMPILER}"
    name = library.library_name(compiler)
    stored = [path for place in cache_directories() if (path := place / name).exists()]
    done = f"compiled, {stored[0]}" if stored else "compiled at the first start"
    return f"{native}, by {compiler}: {done}"


def _attention(fewest: int) -> str:
    if fewest == 1:
        return "torch's kernel; in bfloat16 by AMX, also for single queries"
    return f"torch's kernel; decodes are padded to {fewest} queries, as there is no AMX"


def _invariance(fewest: int) -> str:
    """Whether a token's result depends on what else is in its batch."""
    native = "natively in every dtype: seeds hold; without the native forward"
    if fewest == 1:
        return f"{native} in float32, and in bfloat16 for small models"
    return f"{native} in float32 alone, as there is no AMX"


def _cuda(torch: Any) -> str:
    if torch.cuda.device_count():
        from forethought.model.attention import default_backend

        backend = default_backend("cuda")
        return f"models run on the GPU unless --device cpu is given; attention: {backend}"
    return "not available: models run on the processor"
