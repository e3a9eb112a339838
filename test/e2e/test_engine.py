"""`sglang.Engine` in scripts, as its users write them: it says what the server says, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import sglang

REPOSITORY = Path(__file__).resolve().parents[2]

USE_AND_LEAVE = """
import asyncio, json, multiprocessing
from sglang import Engine

GREEDY = {"temperature": 0, "max_new_tokens": 8}

async def from_a_loop(engine):
    whole, stream = await asyncio.gather(
        engine.async_generate("20+22=", GREEDY), engine.async_generate("20+22=", GREEDY, stream=True)
    )
    return whole["text"], [output["text"] async for output in stream][-1]

def refused(error, call, **arguments):
    try:
        call(**arguments)
    except error as caught:
        return str(caught)

if __name__ == "__main__":
    engine = Engine(device="cpu", disable_flashinfer_autotune=True, enable_torch_compile=True)
    abandoned = engine.generate("1+1=", {"max_new_tokens": 1500, "ignore_eos": True}, stream=True)
    next(abandoned)
    abandoned.close()
    print(json.dumps({
        "pids": [process.pid for process in multiprocessing.active_children()],
        "batch": [output["text"] for output in engine.generate(["37+58=", "20+22="], GREEDY)],
        "by_ids": engine.generate(input_ids=[51, 55], sampling_params=GREEDY)["output_ids"],
        "stream": [output["text"] for output in engine.generate("37+58=", GREEDY, stream=True)],
        "logprobs": engine.generate("37+58=", GREEDY, return_logprob=True)["meta_info"]["output_token_logprobs"],
        "async": asyncio.run(from_a_loop(engine)),
        "bad_value": refused(ValueError, engine.generate, prompt="a", sampling_params={"top_p": 2}),
        "unbuilt": refused(ValueError, engine.generate, prompt="a", lora_path="x"),
        "unknown": refused(TypeError, engine.generate, prompt="a", no_such_argument=1),
        "status": engine.get_server_info()["status"],
        "held": engine.get_server_info()["internal_states"][0]["num_running_reqs"],
    }))
"""

LOSE_A_WORKER = """
import json, multiprocessing, os, signal
from sglang import Engine

if __name__ == "__main__":
    errors = []
    with Engine(device="cpu", disable_flashinfer_autotune=True) as engine:
        outputs = engine.generate("1+1=", {"max_new_tokens": 1900, "ignore_eos": True}, stream=True)
        next(outputs)
        pids = [process.pid for process in multiprocessing.active_children()]
        os.kill(pids[0], signal.SIGKILL)
        for _ in range(2):
            try:
                list(outputs)
                engine.generate("1+1=")
            except RuntimeError as error:
                errors.append(str(error))
    print(json.dumps({"errors": errors, "left": len(multiprocessing.active_children())}))
"""


def run(tmp_path: Path, script: str) -> dict:
    """What a script prints as its last line, after it has ended by itself with exit code 0."""
    path = tmp_path / "script.py"
    path.write_text(script)
    environment = {"PYTHONPATH": str(REPOSITORY / "python"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_a_script_gets_what_the_server_says_and_ends_without_a_shutdown(tmp_path, builtin_server, gone):
    said = run(tmp_path, USE_AND_LEAVE)

    def served(**body):
        body = {"sampling_params": {"temperature": 0, "max_new_tokens": 8}, **body}
        return builtin_server.post("/generate", json=body).json()

    assert said["batch"] == [output["text"] for output in served(text=["37+58=", "20+22="])]
    assert said["by_ids"] == served(input_ids=[51, 55])["output_ids"]
    assert said["stream"][-1] == said["batch"][0] and len(said["stream"]) > 3
    assert len(said["logprobs"]) == 8
    assert said["async"] == [said["batch"][1]] * 2
    assert "top_p" in said["bad_value"] and "lora_path" in said["unbuilt"]
    assert "no_such_argument" in said["unknown"]
    assert (said["status"], said["held"]) == ("ready", 0)
    assert said["pids"] and gone(said["pids"])


def test_callers_are_told_when_a_worker_ends(tmp_path):
    said = run(tmp_path, LOSE_A_WORKER)
    assert len(said["errors"]) == 2
    assert said["left"] == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"tp_size": 0}, "--tp-size"),
        ({"model_path": "/no/such/model"}, "--model-path"),
        ({"enable_lora": True}, "enable_lora"),
        ({"nnodes": 2, "tp_size": 2, "dist_init_addr": "127.0.0.1:1"}, "sglang serve"),
    ],
)
def test_a_wrong_flag_is_refused_before_anything_starts(flags, words):
    with pytest.raises(ValueError, match=words):
        sglang.Engine(device="cpu", **flags)


def test_importing_the_package_alone_is_quick():
    code = "import sys, sglang; sglang.__version__; print('torch' in sys.modules, 'fastapi' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "python")}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.stdout.split() == ["False", "False"]
