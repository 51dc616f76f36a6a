"""lm-evaluation-harness over completions and chats, with a task file of our own."""

import json
import os
import subprocess
import sys

import pytest

TASK = """
task: sums
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs:
  until: ["</end>"]
  max_gen_toks: 200
  do_sample: false
filter_list:
  - name: boxed
    filter:
      - function: regex
        regex_pattern: "boxed\\\\{{(-?[0-9]+)\\\\}}"
        group_select: -1
      - function: take_first
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1
"""


@pytest.fixture
def tasks(tmp_path):
    data = tmp_path / "sums.jsonl"
    sums = [(a, b) for a in (2, 3) for b in (4, 5)]
    lines = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in sums]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "sums.yaml").write_text(TASK.format(data=data))
    return tmp_path


@pytest.mark.parametrize("kind", ["local-chat-completions", "local-completions"])
def test_a_task_file_is_evaluated(server, model, tasks, kind):
    path = "chat/completions" if "chat" in kind else "completions"
    args = f"model={model},base_url={server}/v1/{path},num_concurrent=4,max_retries=1"
    args += ",tokenizer_backend=none,tokenized_requests=False,think_end_token=</think>"
    command = [sys.executable, "-m", "lm_eval", "run", "--model", kind, "--model_args", args]
    command += [
        "--tasks",
        "sums",
        "--include_path",
        str(tasks),
        "--output_path",
        str(tasks / "out"),
    ]
    if "chat" in kind:
        command.append("--apply_chat_template")
    offline = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tasks / "hf")}
    done = subprocess.run(
        command, env={**os.environ, **offline}, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (found,) = (tasks / "out").rglob("results_*.json")
    score = json.loads(found.read_text())["results"]["sums"]["exact_match,boxed"]
    assert 0 <= score <= 1
    if "chat" in kind:
        assert score >= 0.5  # the embedded reasoner adds small numbers
