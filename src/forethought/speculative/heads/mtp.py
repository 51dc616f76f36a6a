"""A multi-token prediction module: one more layer of the target, which reads states and tokens.

DeepSeek-V3 (2024, arXiv 2412.19437, section 2.2). The embedding of a token and the state before it,
each after a norm of its own, are projected back to the model's width; a whole decoder block of the
target's architecture and a norm follow, then the target's output projection. The block is
transformers' own: a module is the target's class with a single layer, entered with the projection
in place of embeddings, so that mixtures of experts, latent attention and any rotary embedding are
the target's.
"""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from typing_extensions import override

from forethought.errors import ModelError
from forethought.model import backends
from forethought.model.attention.base import KEYWORD, ForwardPass
from forethought.model.attention.interface import ATTENTION, PROBE, CapabilityProbe
from forethought.model.attention.layer_profile import LayerProfile
from forethought.model.causal_lm import CausalLM
from forethought.model.checkpoint_module import CheckpointConfig
from forethought.model.llama.layers import Norm, projection
from forethought.model.llama.network import FusedNetwork, is_fusable
from forethought.speculative.draft_module import DraftModule, ModuleOutput
from forethought.speculative.heads.checkpoint import (
    OTHER_KIND,
    OTHER_MODEL,
    TOKEN_MAP,
    Checkpoint,
    refused,
)
from forethought.speculative.heads.mtp_layout import (
    LAYOUTS,
    PARTS,
    MtpLayout,
    StoredModule,
    named,
    read_modules,
    read_token_map,
)
from forethought.transformers_loading import one_module_at_a_time, without_progress_bars

FedBackState = Literal["normed", "unnormed"]
"""Which hidden state is fed back: the output of the module's last norm, or of the block.

TensorRT-LLM, SGLang and transformers use the normed one, vLLM the other one for DeepSeek's modules;
in DeepSeek's paper (equations 21 to 23) the norm belongs to the output head."""

log = logging.getLogger(__name__)


class ModuleStates(NamedTuple):
    """Outputs of a module."""

    states: Tensor
    """[..., hidden]: fed back in place of the target's."""
    normed: Tensor
    """[..., hidden]: output of the last norm, input of the LM head."""


class MtpModule(nn.Module):
    """The weights, and the forward that training differentiates.

    Args:
        model: of the target's class, with one layer.
        layout: concatenation order and position 0 follow it.
        fed_back: which hidden state is fed back.

    Attributes:
        token_map: int64 ``[D]``, the ids of the draft vocabulary; None: all tokens are drafted.
    """

    def __init__(
        self, model: PreTrainedModel, layout: MtpLayout, fed_back: FedBackState = "normed"
    ) -> None:
        super().__init__()
        self.model, self.layout, self.fed_back = model, layout, fed_back
        self.token_map: Tensor | None = None
        weight = model.base_model.norm.weight
        self.enorm, self.hnorm = (copy.deepcopy(model.base_model.norm) for _ in range(2))
        wide, hidden = 2 * weight.shape[0], weight.shape[0]
        self.eh_proj = nn.Linear(wide, hidden, bias=False, dtype=weight.dtype, device=weight.device)

    def join(self, embedded: Tensor, states: Tensor, positions: Tensor) -> Tensor:
        """The block's input.

        Args:
            embedded: ``[..., hidden]``, of the tokens.
            states: ``[..., hidden]``, those before them.
            positions: int64 ``[...]``, of the states.

        Returns:
            ``[..., hidden]``.
        """
        if self.layout.zero_first:
            embedded = embedded.masked_fill((positions == 0)[..., None], 0.0)
        token, state = self.enorm(embedded), self.hnorm(states)
        both = [state, token] if self.layout.hidden_first else [token, state]
        joined: Tensor = self.eh_proj(torch.cat(both, -1))
        return joined

    def forward(
        self, embedded: Tensor, states: Tensor, positions: Tensor, **kwargs: Any
    ) -> ModuleStates:
        """Compute R rows of W positions with causal attention.

        Args:
            embedded: ``[R, W, hidden]``, see :meth:`join`, as are the others.
            states: ``[R, W, hidden]``.
            positions: int64 ``[R, W]``.
            kwargs: for the attention.

        Returns:
            ``[R, W, hidden]`` each.
        """
        decoder, inputs = self.model.base_model, list[Tensor]()
        hook = decoder.norm.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        try:
            output = decoder(
                inputs_embeds=self.join(embedded, states, positions),
                position_ids=positions,
                use_cache=False,
                **kwargs,
            )
        finally:
            hook.remove()
        normed = output.last_hidden_state
        return ModuleStates(normed if self.fed_back == "normed" else inputs[0], normed)

    @classmethod
    def fresh(
        cls, lm: CausalLM, layout: str = "deepseek", fed_back: FedBackState = "normed"
    ) -> MtpModule:
        """A module for ``lm`` with random weights in float32, ready to be trained."""
        return cls(_one_layer_model(lm).to(lm.device), LAYOUTS[layout], fed_back)


class MtpDraftModule(DraftModule, Protocol):
    """An MTP module over pages."""

    def read(self, states: Tensor, forward_pass: ForwardPass) -> ModuleStates:
        """Compute T entries; outputs at the R positions in the batch's ``logit_index``.

        Args:
            states: ``[T, hidden]``.
            forward_pass: over a storage of one layer; its batch has the tokens and, as positions,
                those of the states.
        """
        ...

    def most_probable(self, normed: Tensor) -> Tensor:
        """States after the last norm ``[..., hidden]`` -> the target's ids, int64 ``[...]``."""
        ...


def mtp_network(module: MtpModule, lm: CausalLM) -> MtpDraftModule:
    """The module over pages: in C++ where the target runs there, else in torch operations."""
    return backends.cpu().mtp_module(module, lm) or MtpNetwork(module, lm)


class MtpNetwork(MtpDraftModule):
    """An :class:`MtpModule` over pages; see ``speculative.draft_module``.

    Args:
        module: in the dtype and on the device of the target; its weights are used.
        lm: the target.
    """

    forward_path = "torch"
    draft_chains = draft_trees = None

    def __init__(self, module: MtpModule, lm: CausalLM) -> None:
        self._module, self._lm = module, lm
        profile = profile_of(module)
        self.shape, self.dtype = profile.shape, lm.dtype
        self.windows: Sequence[int | None] = (profile.window,)
        self.ids = None if module.token_map is None else module.token_map.to(lm.device)
        self.vocab_size = lm.vocab_size if self.ids is None else len(self.ids)
        self._projection: Tensor | None = None  # [D, hidden]; None: the target's
        if self.ids is not None:
            self._projection = lm.output_projection(self.ids)
        module.model.set_attn_implementation(ATTENTION)
        self._fused: _FusedModule | None = None
        if lm.path.kind != "transformers" and is_fusable(module.model):
            self._fused = _FusedModule(module, lm.max_positions)

    @override
    def enter(self, states: Tensor) -> Tensor:
        """The target's state after its final norm is read unchanged."""
        return states

    @override
    def read(self, states: Tensor, forward_pass: ForwardPass) -> ModuleStates:
        batch = forward_pass.batch
        embedded = self._lm.embed(batch.token_ids)
        if self._fused is not None:
            return self._fused(embedded, states, forward_pass)
        carried = {KEYWORD: forward_pass}
        output = self._module(embedded[None], states[None], batch.positions[None], **carried)
        return ModuleStates(
            output.states[0, batch.logit_index], output.normed[0, batch.logit_index]
        )

    @override
    def most_probable(self, normed: Tensor) -> Tensor:
        tokens = self._logits(normed).argmax(-1)
        return tokens if self.ids is None else self.ids[tokens]

    @override
    def __call__(self, states: Tensor, forward_pass: ForwardPass) -> ModuleOutput:
        output = self.read(states, forward_pass)
        return ModuleOutput(output.states, self._logits(output.normed))

    def _logits(self, normed: Tensor) -> Tensor:
        """``[..., hidden]`` -> ``[..., vocab_size]``."""
        if self._projection is None:
            return self._lm.unembed(normed)
        return nn.functional.linear(normed, self._projection)


class _FusedModule:
    """An MTP module in few operations, where the target's class allows it.

    Args:
        module: its block's weights are used.
        max_positions: tokens that a sequence may have.
    """

    def __init__(self, module: MtpModule, max_positions: int) -> None:
        layout, norms = module.layout, [module.enorm, module.hnorm]
        self._fed_back = module.fed_back
        self._order = (1, 0) if layout.hidden_first else (0, 1)
        weights = torch.stack([norms[index].weight for index in self._order])
        self._norms = Norm(weights, module.enorm.variance_epsilon)
        self._project, self._zero_first = projection(module.eh_proj.weight), layout.zero_first
        self._network = FusedNetwork(module.model, max_positions)

    def __call__(self, embedded: Tensor, states: Tensor, forward_pass: ForwardPass) -> ModuleStates:
        """embedded, states ``[T, hidden]`` -> ``[R, hidden]`` each; see ``MtpNetwork.read``."""
        if self._zero_first:
            first = forward_pass.batch.positions == 0
            embedded = embedded.masked_fill(first[:, None], 0.0)
        both = (embedded, states)
        normed = self._norms(torch.stack([both[index] for index in self._order], 1))
        x = self._network.decode(self._project(normed.flatten(1)), forward_pass, narrow=True)
        exit_ = self._network.norm(x)
        return ModuleStates(exit_ if self._fed_back == "normed" else x, exit_)


def load_modules(
    directory: Path, lm: CausalLM, max_modules: int | None = None, fed_back: FedBackState = "normed"
) -> list[MtpModule]:
    """The MTP modules of a directory, in the target's dtype and on its device.

    Args:
        directory: the target's own, or one with modules alone.
        lm: the target.
        max_modules: the maximum to read; None: all.
        fed_back: which hidden state is fed back.

    Raises:
        ModelError: there are none, or a tensor is missing, unexpected or misshapen.
    """
    layout, stored = read_modules(directory, max_modules)
    modules = [_load(directory, lm, layout, module_files) for module_files in stored]
    token_map = read_token_map(directory, lm.vocab_size)
    for module in modules:
        module.fed_back, module.token_map = fed_back, token_map
    return modules


def save_modules(
    modules: Sequence[MtpModule], directory: Path, layout: str = "deepseek", first: int = 0
) -> None:
    """Write modules alone into a directory, as :func:`load_modules` reads them. A draft vocabulary
    is an extension of the layout.

    Args:
        modules: in order.
        directory: created where needed.
        layout: of the names; the one that the modules were built with.
        first: the number of the first one: in DeepSeek's names that of the target's layers.
    """
    names = LAYOUTS[layout]
    assert all(module.layout == names for module in modules)
    tensors = named(names, [_stored(module, first + n) for n, module in enumerate(modules)])
    if modules[0].token_map is not None:
        tensors[TOKEN_MAP] = modules[0].token_map
    model = modules[0].model.config
    config = {
        "architectures": ["MtpModules"],
        "model_type": model.model_type,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": first,
        "num_nextn_predict_layers": len(modules),
        "dtype": str(modules[0].eh_proj.weight.dtype).removeprefix("torch."),
    }
    Checkpoint(directory, config, tensors).write()


def check_target(lm: CausalLM) -> None:
    """Raises ModelError for a target of which no module can be made."""
    with torch.device("meta"):
        _one_layer_model(lm)


def _one_layer_model(lm: CausalLM) -> PreTrainedModel:
    """Of the target's class, with one layer and random weights in float32."""
    config = one_layer_config(lm.config)
    config._attn_implementation = None  # not the target's: transformers' own choice
    with one_module_at_a_time():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if not hasattr(model.base_model, "norm"):
        raise ModelError(
            "no MTP modules can be made for this model",
            f"its {type(model.base_model).__name__} has no 'norm' after the layers, as the classes "
            "of models with such modules have",
            "Use another kind of drafter, such as EAGLE-3",
        )
    return model


def one_layer_config(config: Any) -> Any:
    """A target's config with one layer: the kind that MTP modules have, and no vocabulary.

    Settings per layer are those of the last layer; attention is full where any layer's is.
    """
    if isinstance(config, CheckpointConfig):
        config = config.to_transformers()
    small = copy.deepcopy(config.get_text_config(decoder=True))
    for name, value in small.to_dict().items():
        if isinstance(value, list) and len(value) == small.num_hidden_layers:
            whole = name == "layer_types" and "full_attention" in value
            setattr(small, name, ["full_attention" if whole else value[-1]])
    # Settings that make the first layers different, in the families that have such.
    alike = {"first_k_dense_replace": 0, "mlp_only_layers": [], "decoder_sparse_step": 1}
    # Settings with which a class builds MTP modules of its own.
    without = {"num_nextn_predict_layers": 0, "num_mtp_layers": 0, "mtp_num_hidden_layers": 0}
    for name, value in (alike | without).items():
        if hasattr(small, name):
            setattr(small, name, value)
    small.num_hidden_layers, small.vocab_size = 1, 1
    small.pad_token_id = small.bos_token_id = small.eos_token_id = None
    small.tie_word_embeddings = False
    return small


def _load(directory: Path, lm: CausalLM, layout: MtpLayout, stored: StoredModule) -> MtpModule:
    config = one_layer_config(lm.config)
    with one_module_at_a_time(), torch.device("meta"):
        kind = type(AutoModelForCausalLM.from_config(config))
    root, block = kind.base_model_prefix, layout.block.format(n=stored.number)
    norm = {name: tensor for name, tensor in stored.parts.items() if name.startswith("norm.")}
    tensors = {f"{root}.layers.0.{name}": tensor for name, tensor in stored.block.items()}
    tensors |= {f"{root}.{name}": tensor for name, tensor in norm.items()}
    empty = torch.zeros(1, config.hidden_size, dtype=torch.float32)
    tensors |= {f"{root}.embed_tokens.weight": empty, "lm_head.weight": empty}
    try:
        with without_progress_bars(), one_module_at_a_time():
            model, report = kind.from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                dtype=lm.dtype,
                attn_implementation=PROBE,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:  # transformers raises anything
        raise refused(directory, str(error).strip().split("\n")[0]) from error
    published_names = {
        f"{root}.layers.0.": block,
        f"{root}.norm.": layout.part("norm", stored.number),
    }
    _expect_whole(directory, report, published_names)
    module = MtpModule(model.to(lm.device), layout)
    _fill_parts(directory, module, stored)
    return module.eval().requires_grad_(False)


def _expect_whole(
    directory: Path, report: Mapping[str, Any], published_names: Mapping[str, str]
) -> None:
    """Refuse missing, unexpected and misshapen tensors, under the checkpoint's own names.

    published_names: prefixes of the names in ``report`` -> those of the checkpoint.
    """
    for key, trouble, fix in (
        ("missing_keys", "lacks", OTHER_KIND),
        ("unexpected_keys", "has unexpected", OTHER_KIND),
        ("mismatched_keys", "has the wrong shape for", OTHER_MODEL),
    ):
        names = [entry if isinstance(entry, str) else entry[0] for entry in report[key]]
        for prefix, published in published_names.items():
            names = [name.replace(prefix, published, 1) for name in names]
        Checkpoint(directory, {}, {}).expect_none(names, trouble, fix)


def _fill_parts(directory: Path, module: MtpModule, stored: StoredModule) -> None:
    for part in PARTS[:3]:
        prefix = module.layout.part(part, stored.number)
        tensors = {
            prefix + name.removeprefix(f"{part}."): tensor
            for name, tensor in stored.parts.items()
            if name.startswith(f"{part}.")
        }
        holder = getattr(module, part)
        expected = {prefix + name: tensor for name, tensor in holder.state_dict().items()}
        Checkpoint(directory, {}, {}).expect_fit(tensors, expected)
        holder.load_state_dict({name.removeprefix(prefix): x for name, x in tensors.items()})


def _stored(module: MtpModule, number: int) -> StoredModule:
    parts = {
        f"{part}.{name}": tensor
        for part in PARTS[:3]
        for name, tensor in getattr(module, part).state_dict().items()
    }
    with tempfile.TemporaryDirectory() as path, without_progress_bars():
        module.model.save_pretrained(path)
        files = sorted(Path(path).glob("*.safetensors"))
        tensors = {name: x for file in files for name, x in load_file(file).items()}
    root = module.model.base_model_prefix
    layer, norm = f"{root}.layers.0.", f"{root}.norm."
    block = {name.removeprefix(layer): x for name, x in tensors.items() if name.startswith(layer)}
    parts |= {
        f"norm.{name.removeprefix(norm)}": x for name, x in tensors.items() if name.startswith(norm)
    }
    return StoredModule(number, parts, block)


def profile_of(module: MtpModule) -> LayerProfile:
    """Attention capabilities that the module's layer needs, found by a small forward."""
    weight = module.eh_proj.weight
    hidden, tokens = weight.shape[0], 3
    states = torch.zeros(1, tokens, hidden, dtype=weight.dtype, device=weight.device)
    positions = torch.arange(tokens, device=weight.device)[None]
    probe = CapabilityProbe()
    module.model.set_attn_implementation(PROBE)
    with torch.inference_mode():
        module(states, states, positions, **{KEYWORD: probe})
    [profile] = probe.profile(1, 0)
    return profile
