"""Requests that are meant to hold up a server, for the test of the event loop and ``make soak``."""

from __future__ import annotations

import json
from typing import Any

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
EMBEDDINGS, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"
OLLAMA = "/api/chat"
SHAPE = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
BOMB = "start: " + " ".join(['("a"|"b")*'] * 4000)


def chat(content: str = "What is 1 + 1?", **fields: Any) -> dict[str, Any]:
    """A chat that would be short."""
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}


def nested(depth: int) -> bytes:
    """Lists within lists."""
    return b"[" * depth + b"]" * depth


def schema(num_properties: int) -> dict[str, Any]:
    """A schema with many required properties."""
    names = [f"property_{number}" for number in range(num_properties)]
    kinds = {"type": ["string", "integer"], "description": "one of many"}
    return {"type": "object", "properties": dict.fromkeys(names, kinds), "required": names}


def shaped(given: dict[str, Any]) -> dict[str, Any]:
    """A ``response_format`` of a schema."""
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": given}}


def tool(number: int, num_properties: int = 4) -> dict[str, Any]:
    """A tool of a chat."""
    function = {"name": f"tool_{number}", "parameters": schema(num_properties)}
    return {"type": "function", "function": function}


def history(count: int, size: int = 10) -> list[dict[str, Any]]:
    """A long conversation."""
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": "ab " * size} for n in range(count | 1)]


def requests() -> dict[str, tuple[str, bytes]]:
    """By what is wrong with them: the path and the body."""
    bodies: dict[str, tuple[str, Any]] = {
        "a vote in a vote in a vote": (CHAT, chat(method="+".join(["majority_vote@1024"] * 3))),
        "a thousand samples": (CHAT, chat(method="majority_vote@1024")),
        "samples of samples": (CHAT, chat(method="majority_vote@32+majority_vote@32")),
        "a thousand stages": (CHAT, chat(method="&".join(["plain"] * 150))),
        "a long prompt": (CHAT, chat("a " * 3_000_000)),
        "a long prompt without spaces": (COMPLETIONS, {"prompt": "a" * 7_000_000}),
        "a long question of a vote": (CHAT, chat("a " * 400_000, method="majority_vote@64")),
        "many token ids": (COMPLETIONS, {"prompt": [5] * 250_000}),
        "many wrong token ids": (COMPLETIONS, {"prompt": ["x"] * 250_000 + [{}]}),
        "many prompts": (COMPLETIONS, {"prompt": ["hello"] * 100_000}),
        "too many values": (COMPLETIONS, {"prompt": [0] * 2_000_000}),
        "many empty messages": (CHAT, {"messages": [{}] * 200_000}),
        "many messages": (CHAT, chat(messages=history(80_000))),
        "a long history": (CHAT, chat(messages=history(8_000, 20))),
        "many parts": (
            CHAT,
            chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 80_000}]),
        ),
        "many items": (RESPONSES, {"input": [{"role": "user", "content": "a"}] * 80_000}),
        "many unknown fields": (CHAT, chat(**{f"field_{n}": n for n in range(150_000)})),
        "many stop strings": (CHAT, chat(stop=["a" * 1000] * 5_000)),
        "all stop strings": (CHAT, chat(stop=["a" * 1000 + str(n) for n in range(32)])),
        "a large logit_bias": (CHAT, chat(logit_bias={str(n): 1.0 for n in range(200_000)})),
        "many choices": (CHAT, chat(n=1_000_000)),
        "all choices": (CHAT, chat(n=128)),
        "many tools": (CHAT, chat(tools=[tool(n) for n in range(5_000)])),
        "large tools": (CHAT, chat(tools=[tool(n, 100) for n in range(128)])),
        "a forced call of a large tool": (
            CHAT,
            chat(tools=[tool(0, 6_000)], tool_choice="required"),
        ),
        "a large schema": (CHAT, chat(response_format=shaped(schema(8_000)))),
        "a schema larger than allowed": (CHAT, chat(response_format=shaped(schema(15_000)))),
        "a large enum": (CHAT, chat(response_format=shaped({"enum": list(range(60_000))}))),
        "a grammar bomb": (CHAT, chat(structured_outputs={"grammar": BOMB})),
        "many choices of a shape": (
            CHAT,
            chat(structured_outputs={"choice": [f"{n}" + "x" * 500 for n in range(1024)]}),
        ),
        "large settings": (CHAT, chat(method="archon", method_params={"pipeline": [0] * 100_000})),
        "a large metadata": (CHAT, chat(metadata={"a": [{}] * 200_000})),
        "many words of a setting": (
            CHAT,
            chat(method="dynasor", method_params={"uncertain_words": ["a"] * 60_000}),
        ),
        "a crowd of workers": (
            CHAT,
            chat(method="hogwild", method_params={"workers": [f"w{n}" for n in range(1000)]}),
        ),
        "a wide search": (
            CHAT,
            chat(method="beam_search", method_params={"default_sample_num": 1024}),
        ),
        "a thousand drafts for one fuser": (
            CHAT,
            chat(
                method="archon",
                method_params={
                    "pipeline": {
                        "layers": [[{"type": "generator", "samples": 1000}], [{"type": "fuser"}]]
                    }
                },
            ),
        ),
        "many documents": (
            CHAT,
            chat(method="drag", method_params={"documents": ["word " * 100] * 5000}),
        ),
        "a chain of references": (
            CHAT,
            chat(
                response_format=shaped(
                    {
                        "$ref": "#/$defs/d0",
                        "$defs": {
                            **{f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(8000)},
                            "d8000": {"type": "integer"},
                        },
                    }
                )
            ),
        ),
        "a long name of a model": (CHAT, chat(model="+" * 3_000_000)),
        "a long prediction": (
            CHAT,
            chat(prediction={"type": "content", "content": "a " * 2_000_000}),
        ),
        "many inputs to embed": (EMBEDDINGS, {"input": ["hello there"] * 2048}),
        "too many inputs to embed": (EMBEDDINGS, {"input": ["a"] * 200_000}),
        "a long input to embed": (EMBEDDINGS, {"input": "a " * 3_000_000}),
        "many ids to embed": (EMBEDDINGS, {"input": [[5] * 15] * 2048}),
        "many wrong inputs to embed": (EMBEDDINGS, {"input": ["a"] * 100_000 + [{}]}),
        "many documents to rank": (RERANK, {"query": "a", "documents": ["word " * 50] * 1024}),
        "too many documents": (RERANK, {"query": "a", "documents": [{"text": "a"}] * 60_000}),
        "a long query of many documents": (
            RERANK,
            {"query": "a " * 100_000, "documents": ["b"] * 1000},
        ),
        "many pairs": (SCORE, {"text_1": ["a"] * 60_000, "text_2": ["b"] * 60_000}),
        "many messages of ollama's": (
            OLLAMA,
            {"model": "reasoner", "messages": history(80_000), "stream": False},
        ),
        "a long prompt of ollama's": (
            "/api/generate",
            {"model": "reasoner", "prompt": "a " * 3_000_000, "stream": False},
        ),
        "a large format": (
            OLLAMA,
            {"model": "reasoner", "messages": history(1), "stream": False, "format": schema(8_000)},
        ),
        "many calls of ollama's": (
            OLLAMA,
            {
                "model": "reasoner",
                "stream": False,
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "a"}}] * 8_000},
                    *[{"role": "tool", "tool_name": "b"}] * 8_000,
                ],
            },
        ),
        "a grammar bomb of llama.cpp's": (CHAT, chat(grammar=BOMB)),
        "a text to tokenise": ("/tokenize", {"prompt": "a " * 250_000}),
        "a longer text to tokenise": ("/tokenize", {"prompt": "a " * 3_000_000}),
        "ids to detokenise": ("/detokenize", {"tokens": [5] * 250_000}),
    }
    raw: dict[str, tuple[str, bytes]] = {
        "deeply nested JSON": (CHAT, nested(100_000)),
        "JSON nested within a field": (CHAT, b'{"messages": ' + nested(150) + b"}"),
        "many short lists": (COMPLETIONS, b'{"prompt": [' + b"[]," * 1_000_000 + b"[]]}"),
        "many escapes": (COMPLETIONS, b'{"prompt": "' + b'\\"' * 3_000_000 + b'"}'),
        "many commas in a text": (COMPLETIONS, b'{"prompt": "' + b"," * 7_000_000 + b'"}'),
        "a string without an end": (COMPLETIONS, b'{"prompt": "' + b',\\"' * 2_000_000),
        "a long number": (COMPLETIONS, b'{"seed": ' + b"9" * 5_000_000 + b"}"),
        "many keys": (
            CHAT,
            b"{" + b",".join(b'"key%d":0' % number for number in range(250_000)) + b"}",
        ),
    }
    return {name: (path, json.dumps(body).encode()) for name, (path, body) in bodies.items()} | raw
