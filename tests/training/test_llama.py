"""The training network against transformers' Llama, and what training leaves on disk."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from forethought.training.chat_tokenizer import prompt_text  # noqa: E402
from forethought.training.from_scratch import (  # noqa: E402
    Checkpoint,
    export_model,
    make_optimizers,
)
from forethought.training.llama import Llama, LlamaShape, muon_groups  # noqa: E402
from reasoner.vocabulary import train_tokenizer  # noqa: E402

SHAPE = LlamaShape(hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2)


@pytest.fixture
def network():
    torch.manual_seed(0)
    network = Llama(SHAPE)
    with torch.no_grad():
        for weight in network.parameters():
            weight.normal_(std=0.3)
    return network


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(samples=200)


def test_exported_weights_give_the_logits_of_the_training_network(network):
    config = transformers.LlamaConfig(**network.llama_config(eos_token_id=0))
    llama = transformers.LlamaForCausalLM(config).float()
    missing = llama.load_state_dict(network.llama_state(torch.float32), strict=False)
    assert missing.unexpected_keys == []
    assert missing.missing_keys in ([], ["lm_head.weight"])
    tokens = torch.randint(0, SHAPE.vocab_size, (2, 33))
    with torch.no_grad():
        torch.testing.assert_close(network(tokens), llama(tokens).logits, atol=1e-4, rtol=1e-4)


def test_an_exported_directory_loads_and_opens_the_think_block(network, tokenizer, tmp_path):
    export_model(network, tokenizer, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == loaded.eos_token_id
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    text = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == prompt_text("What is 2 + 3?")


def test_saved_weights_are_loaded_again(network, tmp_path):
    network.to(torch.bfloat16).float().save(tmp_path, eos_token_id=0)
    other = Llama(SHAPE)
    other.load(tmp_path)
    for left, right in zip(network.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right)


def test_loss_leaves_ignored_targets_out(network):
    tokens = torch.randint(0, SHAPE.vocab_size, (1, 8))
    targets = tokens.roll(-1, 1).clone()
    targets[:, 4:] = -100
    logits = network(tokens)[0, :4]
    expected = torch.nn.functional.cross_entropy(logits, targets[0, :4])
    torch.testing.assert_close(network.loss(tokens, targets), expected)


def test_a_checkpoint_restores_weights_step_and_clock(network, tmp_path):
    optimizers = make_optimizers(network, 1e-3)
    Checkpoint(tmp_path / "run.pt", network, optimizers).save(step=7, seconds=1.5)
    other = Llama(SHAPE)
    found = Checkpoint(tmp_path / "run.pt", other, make_optimizers(other, 1e-3)).load()
    assert found == (7, 1.5)
    for left, right in zip(network.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right)


def test_a_missing_checkpoint_means_a_fresh_start(network, tmp_path):
    assert Checkpoint(tmp_path / "none.pt", network, []).load() == (0, 0.0)


def test_muon_trains_the_matrices_of_the_layers_and_adamw_the_rest(network):
    adam, muon = muon_groups(network)
    assert {id(w) for w in muon.parameters} == {
        id(w) for layer in network.layers for w in layer.parameters() if w.ndim == 2
    }
    assert len(muon.parameters) == 4 * SHAPE.num_layers
    together = [id(w) for w in (*adam.parameters, *muon.parameters)]
    assert sorted(together) == sorted(id(w) for w in network.parameters())
    assert (adam.muon, muon.muon, adam.weight_decay) == (False, True, 0.0)
