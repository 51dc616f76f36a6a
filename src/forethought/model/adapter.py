"""LoRA adapters as PEFT saves them: low-rank additions to linears of a model (Hu et al., 2021).

::

    y = x W^T + scale * (x A^T) B^T        A [rank, in], B [out, rank]

    adapter_config.json           rank, lora_alpha, which linears; scale = lora_alpha / rank
    adapter_model.safetensors     base_model.model.<linear>.lora_A.weight, ... .lora_B.weight

What is read here is honoured; everything else that PEFT may write is refused by its name. ``peft``
is not needed. Tensors are read after their names and shapes were checked, and no pickle is opened.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forethought.errors import ModelError, ParameterError
from forethought.model_dir import read_json

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
MAX_RANK = 1024
MAX_CONFIG_BYTES, MAX_PATTERN = 2**20, 4096
"""Bytes of a configuration, and characters of a regular expression in it."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_DTYPES = ("F32", "F16", "BF16")
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.")
_LAYER_PART = re.compile(r"model\.layers\.(\d+)\.(.+)")

_REFUSED = {
    "use_dora": "DoRA rescales the weights, which low-rank additions cannot",
    "modules_to_save": "whole modules are trained beside the low-rank additions",
    "fan_in_fan_out": "weights are stored transposed",
    "trainable_token_indices": "embeddings of tokens are trained",
    "layer_replication": "layers are repeated",
    "target_parameters": "parameters that are no linears, such as experts, are adapted",
    "lora_bias": "the low-rank additions have biases",
    "layers_pattern": "layers are named by a pattern",
    "megatron_config": "the linears are Megatron's",
    "alora_invocation_tokens": "activated LoRA begins in the middle of a prompt",
    "use_qalora": "QALoRA pools its inputs",
    "use_bdlora": "BD-LoRA has block-diagonal matrices",
    "arrow_config": "Arrow routes tokens between adapters",
    "kasa_config": "KaSA changes the weights",
    "monteclora_config": "MonteCLoRA draws its matrices",
    "velora_config": "VeLoRA changes what is computed",
}
"""Fields of a configuration that must be unset, and why."""
_HONOURED = frozenset(
    [
        *("peft_type", "task_type", "r", "lora_alpha", "use_rslora", "target_modules"),
        *("exclude_modules", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights"),
        "layers_to_transform",
    ]
)
_OF_TRAINING = frozenset(
    [
        *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode"),
        *("lora_dropout", "peft_version", "megatron_core", "loftq_config", "eva_config"),
        *("corda_config", "lora_ga_config", "qalora_group_size", "runtime_config"),
        "ensure_weight_tying",
    ]
)
"""Fields that do not matter once an adapter is trained."""
_PLAIN_INITS = (None, True, False, "true", "false", "gaussian", "eva", "orthogonal")
"""Initialisations that leave the weights of the model as they are."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """An addition to a linear: ``(x down^T) up^T``.

    Attributes:
        down: A, float32 ``[rank, in]``.
        up: B times the scale, float32 ``[out, rank]``.
    """

    down: Tensor
    up: Tensor

    @property
    def rank(self) -> int:
        """Width between the two products."""
        return len(self.down)

    def to(self, device: torch.device, dtype: torch.dtype) -> LowRank:
        """The same on a device, in a dtype."""
        return LowRank(self.down.to(device, dtype), self.up.to(device, dtype))


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter as it is read, on the host.

    Attributes:
        name: by which requests choose it.
        digest: a hash of its additions: equal ones compute the same.
        additions: by the name of the linear, as transformers names it.
        targets: tells whether the configuration names a linear.
    """

    name: str
    digest: bytes
    additions: Mapping[str, LowRank]
    targets: Callable[[str], bool]

    def check_fits(self, linears: Mapping[str, tuple[int, int]]) -> None:
        """Raises ModelError unless the model has all linears of the adapter, of its sizes, and the
        adapter all linears of the model that its configuration names. ``linears``: outputs and
        inputs by name.
        """
        for name, addition in self.additions.items():
            size = len(addition.up), addition.down.shape[1]
            if name not in linears:
                raise self.unfit(f"the model has no linear {name}, or none that can be adapted")
            if linears[name] != size:
                raise self.unfit(
                    f"{name} has {linears[name][0]} outputs and {linears[name][1]} inputs, and the "
                    f"adapter's matrices {size[0]} and {size[1]}"
                )
        missing = [name for name in linears if self.targets(name) and name not in self.additions]
        if missing:
            raise self.unfit(f"its target_modules name {missing[0]}, of which it has no matrices")

    def unfit(self, why: str, fix: str = "") -> ModelError:
        """The refusal of this adapter for a model."""
        return ModelError(
            f"the adapter {self.name!r} does not fit the model",
            why,
            fix or "Give the adapter of this very model, of linears in its layers",
        )


def merged(parts: Sequence[LowRank | None], sizes: Sequence[int]) -> LowRank | None:
    """The addition to one linear whose outputs are those of several, of ``sizes`` outputs each, one
    after the other; None if there is none to any of them.
    """
    present = [part for part in parts if part is not None]
    if not present:
        return None
    up = present[0].up.new_zeros(sum(sizes), sum(part.rank for part in present))
    row = column = 0
    for part, size in zip(parts, sizes, strict=True):
        if part is not None:
            up[row : row + size, column : column + part.rank] = part.up
            column += part.rank
        row += size
    return LowRank(torch.cat([part.down for part in present]), up)


LAYER_PRODUCTS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.qkv_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj"),
    "down": ("mlp.down_proj",),
}
"""The products of a Llama-like layer whose linears are merged, and the linears that each may be."""


def layer_product(name: str) -> tuple[int, str] | None:
    """The layer of a linear, and the product that it is a part of; None: of no such layer."""
    match = _LAYER_PART.fullmatch(name)
    if match is None:
        return None
    products = (product for product, parts in LAYER_PRODUCTS.items() if match[2] in parts)
    product = next(products, None)
    return None if product is None else (int(match[1]), product)


def layer_additions(
    adapter: Adapter, linears: Mapping[str, tuple[int, int]]
) -> dict[tuple[int, str], LowRank]:
    """Additions to the merged products of Llama-like layers, by layer and product.

    Raises ModelError if the adapter has one to another linear. ``linears`` as of ``check_fits``.
    """
    members: dict[tuple[int, str], list[str]] = {}
    for name in linears:
        if (place := layer_product(name)) is not None:
            members.setdefault(place, []).append(name)
    for name in adapter.additions:
        if layer_product(name) is None:
            raise adapter.unfit(
                f"{name} is not adapted in this forward", 'Set forward="torch" and fuse=False'
            )
    additions = dict[tuple[int, str], LowRank]()
    for place, names in members.items():
        order = sorted(names, key=lambda name: _position(place[1], name))
        parts = [adapter.additions.get(name) for name in order]
        addition = merged(parts, [linears[name][0] for name in order])
        if addition is not None:
            additions[place] = addition
    return additions


def _position(product: str, linear: str) -> int:
    """Of the outputs of a linear in a product of its layer."""
    return next(i for i, part in enumerate(LAYER_PRODUCTS[product]) if linear.endswith(part))


# ---- files ------------------------------------------------------------------------------------


def read_adapter(name: str, directory: str | Path) -> Adapter:
    """Read the adapter in a directory.

    Raises:
        ParameterError: the name is not a plain one.
        ModelError: the directory is missing or broken, or has what is not honoured.
    """
    check_name(name)
    return _Reader(name, Path(directory)).read()


def check_name(name: str) -> None:
    """Raises ParameterError for a name that could not be told from others."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ParameterError(
            "invalid name of an adapter",
            f"got {name!r}",
            "Use up to 100 letters, digits, '.', '_' and '-', the first a letter or a digit",
        )


class _Reader:
    """Reads and checks one directory."""

    def __init__(self, name: str, directory: Path) -> None:
        self._name, self._directory = name, directory

    def read(self) -> Adapter:
        config_file, weights_file = self._directory / CONFIG, self._directory / WEIGHTS
        self._check_files(config_file, weights_file)
        config = read_json(config_file, "adapter")
        self._check_config(config)
        try:
            with safe_open(weights_file, "pt") as file:
                linears = self._linears(file, config)
                additions = {
                    linear: self._addition(file, linear, scale) for linear, scale in linears.items()
                }
        except (OSError, SafetensorError) as error:
            raise self._broken(f"{WEIGHTS} cannot be read ({_first_line(error)})") from error
        targets = partial(_targets, config)
        return Adapter(self._name, _digest(additions), additions, targets)

    def _check_files(self, config: Path, weights: Path) -> None:
        if not config.is_file():
            raise self._broken(f"there is no {CONFIG}", "Give the directory that PEFT has saved")
        if config.stat().st_size > MAX_CONFIG_BYTES:
            raise self._broken(f"{CONFIG} has more than {MAX_CONFIG_BYTES} bytes")
        if not weights.is_file():
            fix = "Check that the directory is complete"
            if (self._directory / PICKLED).exists():
                fix = f"{PICKLED} is a pickle, which may run code: save it as safetensors"
            raise self._broken(f"there is no {WEIGHTS}", fix)

    def _check_config(self, config: Mapping[str, Any]) -> None:
        """Refuse by name what is not honoured."""
        if config.get("peft_type") != "LORA":
            raise self._broken(f"its peft_type is {config.get('peft_type')!r:.60}", "Give a LORA")
        if config.get("task_type") not in (None, "CAUSAL_LM"):
            raise self._broken(f"its task_type is {config['task_type']!r:.60}, not CAUSAL_LM")
        if config.get("bias", "none") != "none":
            raise self._unsupported(f"bias is {config['bias']!r:.60}: biases are trained, too")
        init = config.get("init_lora_weights", True)
        if init not in _PLAIN_INITS:
            raise self._unsupported(
                f"init_lora_weights is {init!r:.60}, which changes the weights of the model",
                "Convert it to a plain LoRA, as PEFT's save_pretrained does with "
                "path_initial_model_for_weight_conversion",
            )
        for field, why in _REFUSED.items():
            if config.get(field):
                raise self._unsupported(f"it sets {field}: {why}")
        unknown = sorted(
            field
            for field, value in config.items()
            if value and field not in _HONOURED | _OF_TRAINING
        )
        if unknown:
            raise self._unsupported(f"it sets {unknown[0][:60]}, which is not known here")
        self._check_values(config)

    def _check_values(self, config: Mapping[str, Any]) -> None:
        ranks = [config.get("r"), *_mapping(config, "rank_pattern").values()]
        if any(type(rank) is not int or not 1 <= rank <= MAX_RANK for rank in ranks):
            raise self._broken(f"its ranks are not between 1 and {MAX_RANK}: {ranks!r:.80}")
        alphas = [config.get("lora_alpha"), *_mapping(config, "alpha_pattern").values()]
        if any(not _is_number(alpha) for alpha in alphas):
            raise self._broken(f"lora_alpha is no number: {alphas!r:.80}")
        layers = config.get("layers_to_transform")
        layers = [layers] if type(layers) is int else layers or []
        if not isinstance(layers, list) or any(type(layer) is not int for layer in layers):
            raise self._broken("layers_to_transform is no list of layers")
        for field in ("target_modules", "exclude_modules"):
            names = config.get(field)
            texts = [names] if isinstance(names, str) else names or []
            if not isinstance(texts, list) or any(not isinstance(text, str) for text in texts):
                raise self._broken(f"{field} is neither text nor a list of names")
        if not config.get("target_modules"):
            raise self._broken("target_modules is empty")
        self._check_patterns(config)

    def _check_patterns(self, config: Mapping[str, Any]) -> None:
        fields = (config.get(field) for field in ("target_modules", "exclude_modules"))
        patterns = [field for field in fields if isinstance(field, str)]
        for field in ("rank_pattern", "alpha_pattern"):
            patterns += _mapping(config, field)
        for pattern in patterns:
            if len(pattern) > MAX_PATTERN:
                raise self._broken(f"a pattern has more than {MAX_PATTERN} characters")
            try:
                re.compile(pattern)
            except (re.error, RecursionError, OverflowError) as error:
                raise self._broken(f"{pattern!r:.60} is no regular expression ({error})") from error

    def _linears(self, file: Any, config: Mapping[str, Any]) -> dict[str, float]:
        """The adapted linears, whose names and shapes are checked, and their scales."""
        shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        for key in file.keys():  # noqa: SIM118
            match = _TENSOR.fullmatch(key)
            if match is None:
                raise self._unsupported(f"{WEIGHTS} has {key!r:.120}, which is no LoRA of a linear")
            tensor = file.get_slice(key)
            if tensor.get_dtype() not in _DTYPES:
                raise self._broken(f"{key:.120} is in {tensor.get_dtype()}")
            shapes.setdefault(match[1], {})[match[2]] = tuple(tensor.get_shape())
        if not shapes:
            raise self._broken(f"{WEIGHTS} is empty")
        return {name: self._scale(name, pair, config) for name, pair in sorted(shapes.items())}

    def _scale(
        self, linear: str, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]
    ) -> float:
        """Of a linear, of whose two matrices the shapes fit together."""
        if shapes.keys() != {"A", "B"}:
            raise self._broken(f"{linear:.120} has only one of two matrices")
        if not _targets(config, linear):
            raise self._broken(f"{linear:.120} is none of its target_modules")
        rank = _by_pattern(_mapping(config, "rank_pattern"), linear, config["r"])
        alpha = _by_pattern(_mapping(config, "alpha_pattern"), linear, config["lora_alpha"])
        down, up = shapes["A"], shapes["B"]
        if len(down) != 2 or len(up) != 2 or not down[0] == up[1] == rank or 0 in down + up:
            sizes = f"{list(down)} and {list(up)}, and its rank {rank}"
            raise self._broken(f"the matrices of {linear:.120} are {sizes}")
        return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))

    def _addition(self, file: Any, linear: str, scale: float) -> LowRank:
        down, up = (
            file.get_tensor(f"base_model.model.{linear}.lora_{part}.weight").float()
            for part in "AB"
        )
        up = up * scale
        if not (down.isfinite().all() and up.isfinite().all()):
            raise self._broken(f"the matrices of {linear} are not finite")
        return LowRank(down.contiguous(), up.contiguous())

    def _broken(self, why: str, fix: str = "") -> ModelError:
        return ModelError(
            f"cannot load the adapter {self._name!r} in {self._directory}",
            why,
            fix or "Check that the directory is what PEFT has saved of a LoRA",
        )

    def _unsupported(self, why: str, fix: str = "") -> ModelError:
        return ModelError(
            f"the adapter {self._name!r} in {self._directory} is not supported",
            why,
            fix or "Merge it into the model, and give the result as the model",
        )


def _mapping(config: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    value = config.get(field)
    return value if isinstance(value, Mapping) else {}


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _by_pattern(patterns: Mapping[str, Any], linear: str, default: Any) -> Any:
    """The value of the first pattern that the end of a linear's name matches."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", linear):
            return value
    return default


def _targets(config: Mapping[str, Any], linear: str) -> bool:
    """Whether a configuration names a linear, by the rules of PEFT's LoRA."""
    excluded, targets = config.get("exclude_modules") or (), config["target_modules"]
    if _names(excluded, linear):
        return False
    if targets == "all-linear":
        return True
    if not _names(targets, linear):
        return False
    layers = config.get("layers_to_transform")
    layers = [layers] if isinstance(layers, int) else layers
    if isinstance(targets, str) or not layers:
        return True
    match = _LAYER.match(linear)
    return match is not None and int(match[1]) in layers


def _names(modules: str | Collection[str], linear: str) -> bool:
    """Whether a regular expression matches the name, or a list has it or its end."""
    if isinstance(modules, str):
        return re.fullmatch(modules, linear) is not None
    return any(linear == name or linear.endswith(f".{name}") for name in modules)


def _digest(additions: Mapping[str, LowRank]) -> bytes:
    digest = blake2b(digest_size=16)
    for name, addition in additions.items():
        digest.update(f"{name} {tuple(addition.up.shape)} {addition.down.shape[1]}\n".encode())
        for matrix in (addition.down, addition.up):
            digest.update(matrix.numpy().tobytes())
    return digest.digest()


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200] or type(error).__name__
