"""Tools: a chat whose model calls the tools of an MCP server, a program that is started for it.

A scripted model stands in for one that can call tools. With a model of your own give
``"generation": EngineWorker.init_with_new_llm("/path/to/model")``.
"""

import sys

from forethought.scaffolding import (
    AssistantMessage,
    ChatTask,
    ChatWithMCPController,
    MCPWorker,
    NativeGenerationController,
    ScaffoldingLlm,
    ToolMessage,
    Worker,
)

SERVER = """
from mcp.server.mcpserver import MCPServer

server = MCPServer("calculator", log_level="ERROR")

@server.tool()
def multiply(a: int, b: int) -> int:
    '''Multiply two numbers.'''
    return a * b

server.run()
"""


class Model(Worker):
    """Asks for a product, and repeats the answer."""

    async def chat(self, task: ChatTask) -> None:
        """Say the next message."""
        last = task.messages[-1]
        if isinstance(last, ToolMessage):
            task.output_str = f"It is {last.content}."
            task.add_message(AssistantMessage(task.output_str))
        else:
            function = {"name": "multiply", "arguments": '{"a": 127, "b": 45}'}
            task.output_str = ""
            task.add_message(AssistantMessage(None, tool_calls=[{"id": "1", "function": function}]))

    task_handlers = {ChatTask: chat}  # noqa: RUF012


tools = MCPWorker([[sys.executable, "-c", SERVER]])
controller = ChatWithMCPController(NativeGenerationController())
with ScaffoldingLlm(controller, {"generation": Model(), "tool_call": tools}) as llm:
    result = llm.generate("What is 127 * 45?")
print(result.output.text, result.output.meta["tools"])
