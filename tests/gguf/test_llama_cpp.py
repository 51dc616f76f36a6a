"""llama.cpp reads the files that these tests write, and computes what transformers does.

So what the reader is tested with is the format as its own program understands it. It needs
``llama-cpp-python``, which is compiled when it is installed, and is skipped without it.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from gguf_files import MODELS, module_of_case, write_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed"
    ),
]

DIFFERENT = {
    "mistral": "llama.cpp reads no window of this architecture",
    "bamba": "llama.cpp rotates other dimensions where only a part of a head is rotated",
    "granitehybrid_rotated": "llama.cpp needs a bias of the convolution",
}
IDS = [(7 * i * i + 3 * i + 5) % 290 + 5 for i in range(24)]
MAX_DIFFERENCE = 0.01
"""Of a logit, in standard deviations of all of them: llama.cpp keeps keys and values in float16."""

LOGITS = """
import json, sys
import numpy as np
from llama_cpp import Llama
path, ids, out = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
model = Llama(path, n_ctx=64, n_threads=2, logits_all=True, verbose=False, flash_attn=False)
model.eval(ids)
np.save(out, np.array(model.scores[: len(ids)]))
"""


@pytest.mark.parametrize("case", [case for case in MODELS if case not in DIFFERENT])
def test_llama_cpp_computes_the_logits_of_transformers_from_a_file(
    case: str, tmp_path: Path
) -> None:
    module = module_of_case(case)
    weights = module.state_dict()
    if module.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    file, out = write_model(tmp_path / "model.gguf", case, weights=weights), tmp_path / "logits.npy"
    command = [sys.executable, "-c", LOGITS, str(file), json.dumps(IDS), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    with torch.no_grad():
        expected = module(torch.tensor([IDS])).logits[0].double().numpy()
    difference = np.abs(np.load(out) - expected).max() / expected.std()
    assert difference < MAX_DIFFERENCE
