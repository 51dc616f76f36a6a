"""What a controller asks for: tasks carry the input down to a worker and the results back up.

The fields and their names are those of ``tensorrt_llm.scaffolding``; what is added is said so.
Knows nothing about who executes a task.
"""

from forethought.scaffolding.messages import (
    AssistantMessage,
    RoleMessage,
    SystemMessage,
    UserMessage,
)
from forethought.scaffolding.task.chat import ChatTask
from forethought.scaffolding.task.compute import ComputeTask
from forethought.scaffolding.task.generation import ForkPoint, GenerationTask, StreamGenerationTask
from forethought.scaffolding.task.reward import RewardTask
from forethought.scaffolding.task.task import OnFailure, Task, TaskStatus

__all__ = [
    "AssistantMessage",
    "ChatTask",
    "ComputeTask",
    "ForkPoint",
    "GenerationTask",
    "OnFailure",
    "RewardTask",
    "RoleMessage",
    "StreamGenerationTask",
    "SystemMessage",
    "Task",
    "TaskStatus",
    "UserMessage",
]
