"""What the server has: models, methods, drafters and tokens, as its endpoints write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forethought import methods
from forethought.errors import ParameterError
from forethought.methods import Method
from forethought.methods.table import as_json
from forethought.scaffolding.controller import ConversationForm
from forethought.server.backends.backend import Conversation
from forethought.server.composition import NUM_SAMPLES
from forethought.server.method_settings import schema_of
from forethought.server.names import read_model
from forethought.server.protocol.chat_request import message_dicts
from forethought.server.protocol.completion_request import (
    DetokenizeRequest,
    TemplateRequest,
    TokenizeRequest,
)
from forethought.server.service import Service

_TITLES: Mapping[str, str] = {
    "dynasor": "Dynasor-CoT",
    "specreason": "SpecReason",
    "deepconf": "DeepConf",
    "deepconf_online": "DeepConf online",
    "dvts": "DVTS",
    "mcts": "MCTS",
    "particle_gibbs": "Particle Gibbs",
    "self_refine": "Self-Refine",
    "hogwild": "Hogwild! Inference",
    "hogwild_turns": "Hogwild! in turns",
    "drag": "DRAG",
    "iterdrag": "IterDRAG",
    "sleep_time": "Sleep-time compute",
    "genrm": "GenRM",
}
"""Of methods whose papers write their names in a way of their own."""
_REWARD = "reward_controller"
_UNLISTED = ("sampling_params", "custom_sampling_params", "streaming")
"""Settings that fields of a request stand for."""
_CONTEXT: Mapping[str, int] = {"archon": 4096}
"""Tokens of context that methods need whose prompts hold several whole answers."""


def models(service: Service) -> dict[str, Any]:
    """The body of ``GET /v1/models``: the models, and where the server's settings say so each with
    every method that can answer chats in front of it.
    """
    names, listed = service.models, list[str]()
    if service.settings.lists_methods:
        methods_here = (entry for entry in method_list(service)["data"] if entry["available"])
        listed = [entry["name"] for entry in methods_here if entry["conversation"]]
    with_methods = [f"{method}-{name}" for name in names for method in listed if method != "plain"]
    entries = [_model(service, name) for name in names]
    return {"object": "list", "data": entries + [_model(service, name) for name in with_methods]}


def model(service: Service, name: str) -> dict[str, Any]:
    """The body of ``GET /v1/models/NAME``; with methods in front of the name, too.

    Raises UnknownNameError if there is no such model.
    """
    read_model(name, service.models, service.methods)
    return _model(service, name)


def _model(service: Service, name: str) -> dict[str, Any]:
    adapters = service.adapters
    return {
        "id": name,
        "object": "model",
        "created": int(service.started),
        "owned_by": "forethought",
        "max_model_len": service.backend.max_length,
        **({"parent": adapters[name][0]} if name in adapters else {}),
    }


def method_list(service: Service) -> dict[str, Any]:
    """The body of ``GET /v1/methods``."""
    names = [name for name in service.methods.names() if name not in methods.REWARDS]
    return {"object": "list", "data": [_method(service, name) for name in names]}


def _method(service: Service, name: str) -> dict[str, Any]:
    method, settable = service.methods.describe(name), schema_of(service.methods).settable(name)
    defaults = dict(method.parameters)
    if defaults.get("default_sample_num") == 1:
        defaults["default_sample_num"] = NUM_SAMPLES
    reason, needed = _missing(service, name, defaults), _needed(service, defaults)
    return {
        "name": name,
        "title": _TITLES.get(name, name.replace("_", " ").capitalize()),
        "group": method.group,
        "paper": method.paper,
        "summary": method.description,
        "thinking": method.uses_thinking,
        "available": reason is None,
        "reason": reason,
        "needs": needed,
        "conversation": _takes_conversations(service, method),
        "parameters": [
            {
                "name": parameter,
                "default": as_json(default),
                "required": parameter in needed,
                "description": method.explanations.get(parameter, ""),
                "schema": settable[parameter].json_schema(),
            }
            for parameter, default in defaults.items()
            if parameter in settable and parameter not in _UNLISTED
        ],
    }


def _takes_conversations(service: Service, method: Method) -> bool:
    """Whether a method answers chats and responses here, or texts alone."""
    if method.conversation == ConversationForm.TEXT and not service.backend.takes_text:
        return False
    is_here = service.backend.missing(method.name) is None
    return method.conversation != ConversationForm.NONE and is_here


def _needed(service: Service, defaults: dict[str, Any]) -> list[str]:
    """The settings that a request has to give a method."""
    required = [key for key, default in defaults.items() if default is Method.REQUIRED]
    return [key for key in required if key != _REWARD or service.backend.reward is None]


def _missing(service: Service, name: str, defaults: dict[str, Any]) -> str | None:
    """Why a method cannot run without settings; None if it can."""
    missing = _needed(service, defaults)
    if _REWARD in missing:
        return (
            "it needs a reward model: start the server with --reward-model or --reward-url, or "
            "give method_params with a reward_controller, such as spct"
        )
    if missing:
        return f"it needs method_params with {', '.join(missing)}"
    use = service.methods.describe(name).uses_thinking
    if use == "required" and service.backend.thinks is False:
        return "it is for models that think, and this one does not"
    if name == "specreason":
        return "it needs a second, smaller model"
    length, needed = service.backend.max_length, _CONTEXT.get(name, 0)
    if length is not None and length < needed:
        return f"its prompts need a context of {needed} tokens or more; this model has {length}"
    return service.backend.missing(name)


def drafters(service: Service) -> dict[str, Any]:
    """The body of ``GET /v1/drafters``."""
    entries = [
        {"name": drafter.name, "active": drafter.active, "reason": drafter.reason}
        for drafter in service.backend.drafters()
    ]
    plain = {
        "name": "none",
        "active": not entries,
        "reason": None if entries else "nothing is drafted",
    }
    return {"object": "list", "data": [*entries, plain]}


def tokenize(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    """The body of ``POST /tokenize``.

    Raises UsageError for neither or both of ``prompt`` and ``messages``, or no such model.
    """
    _check_model(service, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ParameterError(
            "one of prompt and messages is needed", "give exactly one", "", param="prompt"
        )
    backend = service.backend
    if body.messages is not None:
        conversation = Conversation(message_dicts(body.messages), prompt_end=body.prompt_end)
        tokens = backend.render(conversation)
    else:
        assert body.prompt is not None, "checked above"
        tokens = backend.tokenize(body.prompt, body.add_special_tokens) if body.prompt else []
    result: dict[str, Any] = {"count": len(tokens), "max_model_len": backend.max_length}
    if body.return_token_strs:
        result["token_strs"] = [backend.detokenize([token]) for token in tokens]
    return {**result, "tokens": tokens}


def apply_template(service: Service, body: TemplateRequest) -> dict[str, Any]:
    """The body of ``POST /apply-template``. Raises UsageError if the template refuses it."""
    _check_model(service, body.model)
    conversation = Conversation(message_dicts(body.messages), prompt_end=body.prompt_end)
    return {"prompt": service.backend.detokenize(service.backend.render(conversation))}


def detokenize(service: Service, body: DetokenizeRequest) -> dict[str, Any]:
    """The body of ``POST /detokenize``. Raises ``UnknownNameError``: there is no such model."""
    _check_model(service, body.model)
    return {"prompt": service.backend.detokenize(body.tokens) if body.tokens else ""}


def _check_model(service: Service, name: str | None) -> None:
    if name:
        read_model(name, service.models, service.methods)
