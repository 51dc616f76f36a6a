"""What a training run leaves on disk: a checkpoint to resume from, and the model directory.

Knows nothing about the schedule or the data.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from forethought.model_dir import replace_file
from forethought.training.reasoner.network import Network
from forethought.training.reasoner.vocabulary import END, save_tokenizer


class Checkpoint:
    """One file that holds network, optimisers, step and seconds of training so far."""

    def __init__(
        self, path: Path, network: Network, optimizers: list[torch.optim.Optimizer]
    ) -> None:
        self.path, self.network, self.optimizers = path, network, optimizers

    def save(self, step: int, seconds: float) -> None:
        """Replace the file at once, so that an interrupted save leaves the older one whole."""
        state = {
            "network": self.network.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": step,
            "seconds": seconds,
        }
        draft = self.path.with_suffix(".tmp")
        torch.save(state, draft)
        replace_file(draft, self.path)

    def load(self) -> tuple[int, float]:
        """Restore everything and return (step, seconds); (0, 0.0) where there is no file."""
        if not self.path.exists():
            return 0, 0.0
        state = torch.load(self.path, weights_only=True)
        self.network.load_state_dict(state["network"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return state["step"], state["seconds"]


def export_model(network: Network, tokenizer: Tokenizer, directory: Path) -> None:
    """Write a directory that transformers loads: config, bf16 weights, tokenizer, template."""
    directory.mkdir(parents=True, exist_ok=True)
    end = tokenizer.token_to_id(END)
    assert end is not None, "the tokenizer was trained with an end token"
    config = network.llama_config(end)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"eos_token_id": end, "pad_token_id": end, "do_sample": False}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    weights = directory / "model.safetensors"
    save_file(network.llama_state(), weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    save_tokenizer(tokenizer, directory, network.shape.max_positions)
