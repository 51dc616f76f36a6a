"""Growing a network leaves its function unchanged, and gives copies gradients of their own."""

import pytest

torch = pytest.importorskip("torch")

from forethought.errors import ParameterError  # noqa: E402
from forethought.training.growth import grow  # noqa: E402
from forethought.training.llama import Llama, LlamaShape  # noqa: E402

SHAPE = LlamaShape(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    max_positions=64,
)


@pytest.fixture
def network():
    torch.manual_seed(0)
    network = Llama(SHAPE)
    with torch.no_grad():
        for weight in network.parameters():
            weight.normal_(std=0.3)
    return network


@pytest.mark.parametrize(("width", "num_layers"), [(1, 2), (2, 2), (1, 5), (3, 4)])
def test_a_grown_network_gives_the_logits_of_the_one_it_grew_from(network, width, num_layers):
    grown = grow(network, width, num_layers)
    assert (grown.shape.hidden_size, grown.shape.num_layers) == (32 * width, num_layers)
    assert grown.shape.head_dim == SHAPE.head_dim
    tokens = torch.randint(0, SHAPE.vocab_size, (2, 17))
    with torch.no_grad():
        torch.testing.assert_close(grown(tokens), network(tokens), atol=1e-4, rtol=1e-4)


def test_copies_of_a_unit_have_different_gradients(network):
    grown = grow(network, 2)
    tokens = torch.randint(0, SHAPE.vocab_size, (2, 17))
    grown.loss(tokens, tokens).backward()
    first, second = grown.layers[0].gate_up.weight.grad.chunk(2)[0].chunk(2)
    assert not torch.allclose(first, second, rtol=1e-2)


def test_a_copy_of_a_layer_learns_although_it_adds_nothing_at_first(network):
    grown = grow(network, num_layers=4)
    assert not grown.layers[1].down.weight.any()
    tokens = torch.randint(0, SHAPE.vocab_size, (2, 17))
    grown.loss(tokens, tokens).backward()
    assert grown.layers[1].down.weight.grad.abs().sum() > 0


def test_a_network_does_not_shrink(network):
    with pytest.raises(ParameterError, match="cannot shrink"):
        grow(network, num_layers=1)


def test_a_grown_network_is_saved_and_loaded_with_its_sizes(network, tmp_path):
    grown = grow(network.to(torch.bfloat16).float(), 2, 3)
    grown.save(tmp_path, eos_token_id=0)
    loaded = Llama.of(tmp_path)
    assert loaded.shape == grown.shape
    assert loaded.layers[2].down.weight.shape == grown.layers[2].down.weight.shape
