"""Options that several commands share: the model and its engine, drafting, settings of methods.

``--config FILE`` holds fields of ``LlmArgs`` as YAML. An option overrides the file, and the file a
command's defaults. ``--set KEY=VALUE`` is a setting of a method.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from forethought import assets
from forethought.config import drafter_table
from forethought.config.engine import LlmArgs, ToolFormatName
from forethought.config.quantization import QUANTIZATIONS
from forethought.config.speculation import DecodingBaseConfig, find_config_class, named_config
from forethought.errors import DependencyError, ParameterError, UsageError
from forethought.methods.stack import SAMPLES as SAMPLE_NUM
from forethought.methods.stack import split
from forethought.model_dir import check_tokenizer_files, checked_model_dir, find_model_dir
from forethought.strict_json import read_json

if TYPE_CHECKING:
    from forethought.llm.async_llm import AsyncLLM


def load_config_file(path: Path) -> dict[str, Any]:
    """The fields in a YAML file, by name; an empty file has none.

    Raises:
        UsageError: the file cannot be read, is not YAML, names a field twice, or is no mapping.
        DependencyError: PyYAML is not installed.
    """
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise DependencyError.missing("PyYAML", "--config", "local") from error
    try:
        with path.open(encoding="utf-8") as stream:
            values = yaml.load(stream, Loader=_once_each(yaml))  # a SafeLoader
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(
            f"cannot read the configuration in {path}", str(error), "Give a YAML file"
        ) from error
    if not isinstance(values, dict | None):
        raise UsageError(
            f"no configuration in {path}",
            f"it holds {type(values).__name__}, not fields by name",
            "Write lines such as 'dtype: bfloat16'",
        )
    return {str(name): value for name, value in (values or {}).items()}


def _once_each(yaml: Any) -> Any:
    """YAML's safe loader, but it refuses a repeated name instead of taking the last."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = [key.value for key, _ in node.value]
            twice = sorted({str(name) for name in names if names.count(name) > 1})
            if twice:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{twice[0]!r} is given twice", node.start_mark
                )
            return super().construct_mapping(node, deep)

    return Loader


SAMPLES = 8
"""Default samples of a vote on the command line."""


def parse_settings(pairs: Iterable[str], option: str = "--set") -> dict[str, Any]:
    """``["threshold=3", "streaming=true"]`` -> ``{"threshold": 3, "streaming": True}``.

    A value is read as JSON (numbers, ``true``, ``false``, ``null``, quoted text, lists), else as
    text.

    Raises ParameterError about ``option`` for a pair without ``=`` or key, or a repeated key.
    """
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ParameterError(
                f"invalid setting {pair!r}", "it is not key=value", f"Write {option} key=value"
            )
        if key in settings:
            raise ParameterError(
                f"setting {key!r} is given twice", f"again as {text!r}", "Give it once"
            )
        settings[key] = _scalar(text)
    return settings


def with_samples(spec: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a method, with ``SAMPLES`` samples where it would draw a single one: classes
    default to 1, as in TensorRT-LLM, but a vote needs several.
    """
    drawing = [method for method in split(spec) if method.draws_samples]
    if not drawing or drawing[-1].samples is not None or drawing[-1].parameters[SAMPLE_NUM] != 1:
        return settings
    return {SAMPLE_NUM: SAMPLES, **settings}


def _scalar(text: str) -> Any:
    try:
        return read_json(text)
    except (ValueError, RecursionError):
        return text


NO_DRAFTS = "none"
"""The value of ``--speculative`` that leaves out the drafter in a model's checkpoint."""


def add_speculation_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    drafters = drafter_table.options()
    notes = [spec.option_help for spec in drafters.values() if spec.option_help]
    parser.add_argument(
        "--speculative",
        choices=[*drafters, NO_DRAFTS],
        help="draft and verify: the same text in less time; none: no drafts, also where the model "
        "ships MTP modules" + (f" ({'; '.join(notes)})" if notes else ""),
    )
    parser.add_argument(
        "--draft-model",
        type=model_path,
        metavar="DIR|ID",
        help="local directory or Hub id of the smaller model, or of the heads, that --speculative "
        "drafts with (default: for the embedded reasoner, its own)",
    )
    parser.add_argument(
        "--max-draft-len",
        type=int,
        metavar="K",
        help="tokens to draft in a row, each time (default: as many as pay, none where none do)",
    )


THINKING = ("thinking_budget", "thinking_soft")
"""Sampling fields of ``add_thinking_options``."""


def add_thinking_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options that limit a reasoning model's thought."""
    parser.add_argument(
        "--thinking-budget",
        type=int,
        metavar="N",
        help="most tokens of thought, then it is closed and the answer follows; 0: no thinking",
    )
    parser.add_argument(
        "--thinking-soft",
        type=int,
        metavar="N",
        help="from N tokens on, close the thought where a line or a sentence ends",
    )


def embedded_draft_model(name: str | None = "draft_target") -> Path | None:
    """Directory of the embedded reasoner's own weights for a drafter of ``--speculative``, if
    any.
    """
    spec = drafter_table.options().get(name or "")
    return None if spec is None else spec.embedded_dir()


def speculative_config_of(
    args: argparse.Namespace, draft_model: Path | None = None, *, model: object = None
) -> DecodingBaseConfig | None:
    """The configuration that the options stand for; None if none is given.

    Args:
        draft_model: what ``--speculative`` drafts with where ``--draft-model`` is not given.
        model: that is drafted for; None: the embedded reasoner, for which there is one.

    Raises:
        UsageError: an impossible value, or an option without what it belongs to.
    """
    embedded = embedded_draft_model(args.speculative) if assets.is_reasoner(model) else None
    draft_model = args.draft_model or (draft_model if draft_model != embedded else None)
    options = {"max_draft_len": args.max_draft_len, "speculative_model": args.draft_model}
    fields = {name: value for name, value in options.items() if value is not None}
    if args.speculative in (None, NO_DRAFTS):
        if fields:
            raise ParameterError(
                "--max-draft-len and --draft-model need --speculative",
                f"{next(iter(fields))} is given, but not how to draft",
                f"Add --speculative with one of {', '.join(drafter_table.options())}",
            )
        return None
    uses_model = find_config_class(args.speculative).uses_model
    if uses_model is False and args.draft_model is not None:
        raise ParameterError(
            f"--speculative {args.speculative} has no draft model",
            "it drafts from the tokens alone",
            "Leave out --draft-model",
        )
    if uses_model and (draft_model or embedded) is None:
        raise ParameterError(
            f"--speculative {args.speculative} needs --draft-model",
            "there is nothing to draft with",
            "Give a smaller model with the same vocabulary, or heads: a directory or Hub id",
        )
    if uses_model is not False and draft_model is not None:
        fields["speculative_model"] = draft_model
    return named_config(args.speculative, model, **fields)


INTRODUCTION = (
    'embedded reasoner: 3.6 M parameters, solves arithmetic word problems such as "Sam has 110 '
    'nuts. He uses 84. How many nuts does Sam have now?"; --model DIR for a real one'
)
"""Shown where the user has named no model."""
_OPTIONS = (
    *("model", "revision", "dtype", "quantization", "device", "tensor_parallel_size"),
    *("tool_format", "expert_memory", "layer_window"),
)


def model_path(text: str) -> Path:
    """A directory or Hub id as given to an option; an empty one is not the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty; give a directory or a Hub id")
    return Path(text)


class _SetModel(argparse.Action):
    """Stores the model, which is named once: after the command or by ``--model``."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if values is None:  # what argparse passes where no MODEL is given
            return
        if namespace.model is not None:
            raise ParameterError(
                "the model is given twice", f"as {namespace.model} and as {values}", "Give one"
            )
        namespace.model = values


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Declare MODEL, another way to give ``--model``."""
    parser.add_argument(
        "model",
        nargs="?",
        action=_SetModel,
        type=model_path,
        metavar="MODEL",
        help=f"the same as --model (default: {assets.REASONER})",
    )


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Declare ``--model`` and what belongs to it."""
    parser.add_argument(
        "--model",
        action=_SetModel,
        type=model_path,
        metavar="DIR|ID|FILE",
        help="local Hugging Face directory, Hub id such as Qwen/Qwen3-0.6B, GGUF file "
        "(model.gguf, user/repository:Q4_K_M, ollama:NAME, smollm2), or an embedded model: "
        f"{' or '.join(assets.names())} (default: {assets.REASONER})",
    )
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a Hub id")
    parser.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="of the weights (default: as the model's config says; float32 on a CPU without fast "
        "products in it; bfloat16 on a CPU for quantised weights)",
    )
    parser.add_argument(
        "--quantization", choices=QUANTIZATIONS, help="store the weights in 8 or 4 bits"
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=["auto", "float32", "bfloat16", "int8"],
        help="of keys and values on a CPU (default: the model's)",
    )
    parser.add_argument(
        "--expert-memory",
        type=float,
        metavar="GIB",
        help="memory for the experts of a mixture; the others are left in a temporary file "
        "(default: all are in memory)",
    )
    parser.add_argument(
        "--layer-window",
        type=int,
        metavar="K",
        help="layers in memory at a time; the others are left in a temporary file, and read in "
        "every step (default: all are in memory)",
    )
    parser.add_argument("--device", help="cpu, cuda, ... (default: CUDA where there is one)")
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        metavar="N",
        help="processes that have a slice of every layer each, on a GPU each or on the CPU",
    )
    parser.add_argument(
        "--tool-format",
        choices=get_args(ToolFormatName),
        help="how the model writes calls of tools (default: as its chat template does)",
    )
    parser.add_argument(
        "--config",
        "--extra_llm_api_options",
        type=Path,
        metavar="FILE",
        help="YAML with any fields of LlmArgs, speculative_config among them",
    )
    add_speculation_options(parser)


def add_adapter_option(parser: argparse.ArgumentParser, purpose: str) -> None:
    """Declare ``--adapter``; ``purpose`` says which requests have the adapters."""
    parser.add_argument(
        "--adapter",
        action="append",
        metavar="NAME=DIR",
        help=f"LoRA adapter of the model, a directory as PEFT saves it: {purpose}",
    )


def adapters_of(args: argparse.Namespace) -> dict[str, str]:
    """The directories of adapters by name. Raises ParameterError for what is not NAME=DIR, or a
    name that is given twice.
    """
    adapters: dict[str, str] = {}
    for pair in getattr(args, "adapter", None) or ():
        name, _, directory = pair.partition("=")
        if not name or not directory or name in adapters:
            why = "the name is given twice" if name in adapters else "it is not NAME=DIR"
            raise ParameterError(f"invalid --adapter {pair!r}", why, "Write --adapter NAME=DIR")
        adapters[name] = directory
    return adapters


def only_adapter(fields: Mapping[str, Any]) -> str | None:
    """The adapter that a command answers with, of those in fields of ``LlmArgs``; None: there is
    none. Raises ParameterError if there are several.
    """
    names = [*fields.get("adapters", ())]
    if len(names) > 1:
        raise ParameterError(
            "several adapters are given", f"{', '.join(names)}: an answer has one", "Give one"
        )
    return names[0] if names else None


def has_model_options(
    args: argparse.Namespace,
    config: Mapping[str, Any] | None = None,
    *,
    left_out: Collection[str] = (),
) -> bool:
    """Whether any option of the model is given, but for those that are ``left_out``; ``config``
    replaces the file of ``--config``.
    """
    further = ("kv_cache_dtype", "speculative", "draft_model", "max_draft_len")
    names = [name for name in (*_OPTIONS, *further) if name not in left_out]
    has_file = args.config is not None if config is None else bool(config)
    has_adapter = getattr(args, "adapter", None) is not None
    return has_file or has_adapter or any(getattr(args, name) is not None for name in names)


def llm_args_of(
    args: argparse.Namespace, config: Mapping[str, Any] | None = None, **defaults: Any
) -> dict[str, Any]:
    """The fields of ``LlmArgs`` that the options stand for, checked.

    Args:
        config: fields in place of those in the file of ``--config``.
        **defaults: fields that the command sets where nothing else does.

    Raises:
        UsageError: a file that cannot be read, an unknown field, or an impossible value.
    """
    if config is None:
        config = {} if args.config is None else load_config_file(args.config)
    fields = defaults | LlmArgs.translated(config)
    options = {name: getattr(args, name) for name in _OPTIONS}
    fields |= {name: value for name, value in options.items() if value is not None}
    if adapters := adapters_of(args):
        fields["adapters"] = adapters
    if args.kv_cache_dtype is not None:
        cache = LlmArgs.from_dict(fields).kv_cache_config
        values = {name: getattr(cache, name) for name in cache.model_fields_set}
        fields["kv_cache_config"] = {**values, "dtype": args.kv_cache_dtype}
    _check_revision(fields)
    speculative = speculative_config_of(args, model=fields.get("model"))
    if speculative is not None or args.speculative == NO_DRAFTS:
        fields["speculative_config"] = speculative
    checked = LlmArgs.from_dict(fields)
    return {name: getattr(checked, name) for name in checked.model_fields_set}


def drafts_where_they_pay(fields: Mapping[str, Any]) -> bool:
    """Whether a drafter of these fields of ``LlmArgs`` is under goodput control."""
    configs = LlmArgs.from_dict(dict(fields)).speculative_config
    return any(config.length_control == "goodput" for config in configs)


def _check_revision(fields: Mapping[str, Any]) -> None:
    model, revision = fields.get("model"), fields.get("revision")
    if revision is None:
        return
    if model is None:
        raise ParameterError(
            "--revision needs --model",
            "the embedded reasoner has no revisions",
            "Leave it out, or name a model of the Hugging Face Hub",
        )
    if Path(model).exists():
        find_model_dir(model, revision)  # refuses it


def check_models(fields: Mapping[str, Any]) -> None:
    """Find the directories of the model, its tokenizer and its drafters, before torch is imported.

    Raises UsageError if there is no such model, or the directory holds none.
    """
    code = bool(fields.get("trust_remote_code"))
    revision = fields.get("revision")
    directory = checked_model_dir(fields.get("model") or assets.REASONER, revision, code=code)
    if fields.get("tokenizer") is not None:
        directory = find_model_dir(fields["tokenizer"], weights=False, code=code)
    check_tokenizer_files(directory)
    configs = fields.get("speculative_config") or ()
    for config in (configs,) if isinstance(configs, DecodingBaseConfig) else configs:
        check_draft_model(config)


def check_draft_model(config: DecodingBaseConfig) -> None:
    """Find the directory of a drafter's model, if it has one. Raises as ``check_models``."""
    if config.speculative_model is not None:
        checked_model_dir(config.speculative_model, config.revision, kind="draft model")


def llm_opener(fields: Mapping[str, Any]) -> Callable[[], AsyncLLM]:
    """A function that builds the model of the ``LlmArgs`` in ``fields``.

    Raises as ``check_models``, and DependencyError if torch or transformers is not installed.
    """
    check_models(fields)
    check_installed()
    from forethought.llm.async_llm import AsyncLLM

    return lambda: AsyncLLM(**fields)


def check_installed() -> None:
    """Raises DependencyError if torch or transformers is not installed."""
    try:
        import forethought.llm.async_llm  # noqa: F401
    except ModuleNotFoundError as error:
        raise DependencyError.missing(
            error.name or "torch", "running a model on this machine", "local"
        ) from error


def expect_positive(args: argparse.Namespace, *names: str) -> None:
    """Raises ParameterError if one of the named options, or an entry of one, is below 1."""
    for name in names:
        value = getattr(args, name)
        if any(number < 1 for number in (value if isinstance(value, list) else [value])):
            option = f"--{name.replace('_', '-')}"
            raise ParameterError(f"invalid {option}", f"got {value}", "Give numbers of at least 1")


def introduction(fields: Mapping[str, Any]) -> str:
    """One line about the embedded model if the user has named no other; else empty."""
    return INTRODUCTION if fields.get("model") is None else ""


def model_label(fields: Mapping[str, Any]) -> str:
    """Name of the chosen model in reports."""
    model = fields.get("model")
    return "embedded reasoner" if assets.is_reasoner(model) else str(model)


GENERATION_CONFIGS = ("auto", "neutral")


def add_generation_config_option(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
) -> None:
    """Declare whose sampling defaults hold."""
    parser.add_argument(
        "--generation-config",
        choices=GENERATION_CONFIGS,
        help="sampling where nothing else sets it: auto, as the model's generation_config.json "
        "says (the default); neutral, temperature 1 and nothing cut",
    )


def uses_model_sampling(args: argparse.Namespace) -> bool:
    """Whether the model's own sampling defaults hold.

    Raises ParameterError if a configuration file has another value than the option's.
    """
    if args.generation_config not in (None, *GENERATION_CONFIGS):
        raise ParameterError(
            "invalid generation_config",
            f"got {args.generation_config!r}",
            f"Write {' or '.join(GENERATION_CONFIGS)}",
        )
    return bool(args.generation_config != "neutral")


def add_thinks_option(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Declare whether the model on a server thinks."""
    parser.add_argument(
        "--thinks",
        choices=("yes", "no"),
        help="whether the model on that server thinks, where nothing here tells it: methods for "
        "models that think are refused on others, and no thought is closed there",
    )


def thinks_of(args: argparse.Namespace) -> bool | None:
    """Whether the model on a server thinks, as the option says; None: it is not given.

    Raises ParameterError if a configuration file has another value than yes and no.
    """
    if args.thinks not in (None, "yes", "no"):
        raise ParameterError("invalid thinks", f"got {args.thinks!r}", "Write yes or no")
    return None if args.thinks is None else args.thinks == "yes"
