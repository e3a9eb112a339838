"""The benchmark's arithmetic and flow, with a tiny model on the CPU in place of a GPU's; its times mean nothing."""

import asyncio
import json
import os
import subprocess
import sys

import pytest
import torch
from flashinfer.autotuner import AutoTuner

from sglang.benchmark.http import Address
from sglang.srt.autotune.bench import __main__ as bench
from sglang.srt.autotune.bench import load, moe, outputs, overlap, tables
from sglang.srt.autotune.bench.bounds import Bounds, moe_work
from sglang.srt.autotune.bench.drive import Driver, build_runner
from sglang.srt.autotune.bench.engine import EngineLoad, measure_engine
from sglang.srt.autotune.bench.geometry import (
    GEOMETRIES,
    GPT_OSS_20B,
    QWEN3_30B_A3B,
    shape_of,
    write_config,
    write_tokenizer,
)
from sglang.srt.autotune.bench.results import ResultFolder
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import ParallelState
from sglang.srt.environ import envs
from sglang.srt.layers.attention.torch_native import TorchNativeAttention
from sglang.srt.layers.fused_moe import moe_shape
from sglang.srt.layers.moe.portfolio import OP_NAME
from sglang.srt.model_executor.decode_graphs import DecodeGraphs
from sglang.srt.server_args import ServerArgs

CPU = torch.device("cpu")
TINY = {
    **QWEN3_30B_A3B,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 264,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}


@pytest.fixture(autouse=True)
def clean_tuner():
    yield
    AutoTuner.get().clear_cache()


def server_args(tmp_path, **changes):
    model = write_config(tmp_path / "model", TINY)
    return ServerArgs(
        model_path=str(model),
        load_format="dummy",
        device="cpu",
        max_running_requests=4,
        chunked_prefill_size=64,
        max_total_tokens=1024,
        **changes,
    )


def test_the_bound_is_the_larger_of_bytes_and_operations():
    bounds = Bounds(bytes_per_s=1e12, flops_per_s=1e15)
    assert bounds.us(num_bytes=2e9) == pytest.approx(2000)
    assert bounds.us(num_bytes=1, flops=3e12) == pytest.approx(3000)


def test_only_the_weights_of_touched_experts_count():
    shape = shape_of(QWEN3_30B_A3B, 8192)
    ids = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 9]], dtype=torch.int32)
    touched, num_bytes, flops = moe_work(shape, ids)
    expert = 3 * 768 * 2048
    assert (touched, num_bytes, flops) == (9, 9 * expert * 2, 2 * 8 * 2 * expert)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_geometry_is_one_that_the_engine_reads(tmp_path, name):
    config = ModelConfig.from_path(str(write_config(tmp_path, GEOMETRIES[name])))
    shape = shape_of(GEOMETRIES[name], 8192)
    assert shape == moe_shape(config, ParallelState.single(), torch.bfloat16, 8192)
    assert shape.has_bias == (name == "gpt-oss-20b")


def test_the_results_of_two_geometries_lie_apart(tmp_path):
    paths = {
        bench.results_of(bench.parser().parse_args(["--out", str(tmp_path), "--geometry", name]))
        for name in GEOMETRIES
    }
    assert paths == {tmp_path, tmp_path / "gpt-oss-20b"}


def test_piece_moe_measures_the_experts_of_gpt_oss():
    changes = {name: TINY[name] for name in TINY if GPT_OSS_20B.get(name, TINY[name]) != TINY[name]}
    kept = ("architectures", "model_type", "attention_bias", "rope_theta", "rms_norm_eps")
    config = {**GPT_OSS_20B, **{name: value for name, value in changes.items() if name not in kept}}
    result = moe.measure_moe(config, 4, CPU, "reference", ["torch_grouped"], repeats=2)
    assert all(row["fallbacks"] == 0 and row["winners"] for row in result["rows"])


def test_piece_moe_measures_each_runner_at_every_power_of_two():
    result = moe.measure_moe(TINY, 16, CPU, "reference", ["torch_grouped", "reference"], repeats=2)
    assert [row["tokens"] for row in result["rows"]] == [1, 2, 4, 8, 16]
    for row in result["rows"]:
        assert min(row[f"{name}_us"] for name in ("bound", "reference", "default", "torch_grouped")) > 0
        assert max(row[f"{name}_error"] for name in ("reference", "torch_grouped")) < 1e-5
        assert row["fallbacks"] == 0 and row["winners"], "what was timed as tuned came from records"
    assert result["stages"]["reference"]["profiles_tuned"] == 5
    text = tables.moe_tables(result)
    assert "portfolio / best single" in text and "torch grouped us" in text
    assert text.count("| 16 |") == 3, "its times, its choice and its errors"
    assert f"| 16 | {result['rows'][-1]['winners'][OP_NAME]} |" in text


def test_piece_engine_loads_once_and_starts_the_stage_four_times(tmp_path):
    small = EngineLoad((1, 4), (8, 64), seq_len=32, decode_repeats=1, prefill_repeats=1)
    result = measure_engine(server_args(tmp_path), small, tmp_path, "reference")
    starts = result["starts"]
    assert starts["disabled"]["status"] == "skipped" and starts["disabled"]["profiles"] == 0
    tuned = starts["cold"]["records"]["tuned"]
    assert starts["cold"]["profiles"] == tuned == 7
    assert starts["warm"]["profiles"] == 0 and starts["warm"]["records"]["user"] == tuned
    assert starts["seeded"]["profiles"] == 0 and starts["seeded"]["records"]["seeded"] == tuned
    assert starts["portfolio"]["profiles"] == tuned
    assert all(start["fallbacks"] == 0 for start in starts.values())
    assert [(row["phase"], row["tokens"]) for row in result["rows"]] == [
        ("decode", 1),
        ("decode", 4),
        ("prefill", 8),
        ("prefill", 64),
    ]
    for row in result["rows"]:
        assert 2 <= row["experts_per_layer"] <= 8
        assert (
            min(row[f"{name}_ms"] for name in ("bound", "tuned", "default", "torch_grouped", "portfolio")) > 0
        )
    text = tables.engine_tables(result)
    assert "| seeded |" in text and "| prefill | 64 |" in text


def test_piece_outputs_compares_with_float32_and_starts_twice(tmp_path, monkeypatch):
    flags = {"max_running_requests": 4, "chunked_prefill_size": 64, "max_total_tokens": 1024}
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    result = outputs.measure_outputs(TINY, 16, [1, 7], [5, 9], CPU, "reference", flags, num_layers=2)
    for row in result["layer"]:
        assert row["tuned_error"] < 1e-5 and row["default_error"] < 1e-5 and row["fallbacks"] == 0
        assert row["torch_grouped_error"] < 1e-5
    for row in result["logits"]:
        assert row["tuned_error"] < 1e-4 and row["fallbacks"] == 0
    assert result["greedy"]["identical"] is True
    assert result["greedy"]["tokens"] == 4 * 32
    assert "identical" in tables.outputs_tables(result)


def test_greedy_through_the_driver_equals_one_prefill_of_everything(tmp_path):
    driver = Driver(build_runner(server_args(tmp_path, disable_flashinfer_autotune=True)))
    prompt = driver.random_ids(6)
    (output,) = driver.greedy([prompt], 4)
    driver.release()
    logits = driver.runner.forward(driver.prefill([prompt + output[:3]]))
    assert int(logits.argmax()) == output[3]
    driver.release()
    assert driver.runner.allocator.available() == 1024
    assert driver.runner.req_to_token_pool.available() == 4


def test_a_driver_that_asks_for_too_much_says_so(tmp_path):
    driver = Driver(build_runner(server_args(tmp_path, disable_flashinfer_autotune=True)))
    with pytest.raises(ValueError, match="5 sequences of 50 tokens in all do not fit"):
        driver.decode(5, 10)


def test_results_are_read_back_and_damage_counts_as_not_done(tmp_path):
    folder = ResultFolder(tmp_path / "out")
    assert folder.read("bounds") is None
    path = folder.write("bounds", {"bounds": {"bytes_per_s": 4e12, "flops_per_s": 8e14}}, seconds=1.25)
    document = folder.read("bounds")
    assert document["result"]["bounds"]["bytes_per_s"] == 4e12
    assert document["provenance"]["packages"]["torch"] == torch.__version__
    assert "4.00 TB/s" in tables.document_tables(document)
    path.write_text(path.read_text()[:50])
    assert folder.read("bounds") is None


def test_finished_pieces_are_not_run_again_unless_asked(tmp_path, monkeypatch):
    folder = ResultFolder(tmp_path)
    folder.write("bounds", {}, seconds=1.0)
    ran = []
    monkeypatch.setattr(bench, "_run_child", lambda command, environment: ran.append(command) or 0)
    arguments = ["--out", str(tmp_path), "--pieces", "bounds", "moe"]
    assert bench.run_pieces(bench.parser().parse_args(arguments), folder) == []
    assert [command[command.index("--pieces") + 1] for command in ran] == ["moe"]
    bench.run_pieces(bench.parser().parse_args([*arguments, "--again"]), folder)
    assert len(ran) == 3


def test_a_failed_piece_is_named_and_the_others_run(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "_run_child", lambda command, environment: int("moe" in command))
    arguments = ["--out", str(tmp_path), "--pieces", "bounds", "moe", "dense"]
    assert bench.run_pieces(bench.parser().parse_args(arguments), ResultFolder(tmp_path)) == ["moe"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_command_says_so_and_ends_with_1(tmp_path, capsys):
    assert bench.main(["--out", str(tmp_path)]) == 1
    assert "it needs a CUDA device" in capsys.readouterr().err


def test_tables_of_a_folder_are_shown_without_a_gpu(tmp_path, capsys):
    ResultFolder(tmp_path).write("bounds", {"bounds": {"bytes_per_s": 4e12, "flops_per_s": 8e14}}, 1.0)
    assert bench.main(["--out", str(tmp_path), "--show"]) == 0
    assert "## bounds" in capsys.readouterr().out


def test_a_child_that_outlives_a_sigterm_is_not_left_behind(tmp_path):
    """The command line as it is, with a piece that only waits: SIGTERM to the parent ends both."""
    script = tmp_path / "wait.py"
    script.write_text(
        "import os, sys\n"
        "from sglang.srt.autotune.bench import __main__ as bench\n"
        "code = 'import os, time; print(os.getpid(), flush=True); os.kill(os.getppid(), 15); time.sleep(60)'\n"
        "bench._run_child([sys.executable, '-c', code], dict(os.environ))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=150, env=environment
    )
    assert done.returncode == 128 + 15
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


def test_serving_tables_show_the_arms_side_by_side_and_whose_kernels_they_ran():
    row = {"concurrency": 16, "requests": 32, "output_tokens_per_s": 100.0, "ttft_ms": 20.0, "itl_ms": 5.0}
    result = {
        "input_len": 512,
        "output_len": 128,
        "requests_per_client": 2,
        "arms": {
            "default": {"start_s": 30.0, "autotune": None, "rows": [row]},
            "tuned": {
                "start_s": 45.0,
                "autotune": {"seconds": 12.0},
                "rows": [{**row, "output_tokens_per_s": 250.0}],
            },
        },
    }
    for arm in result["arms"].values():
        arm["backend"] = "flashinfer_cutlass"
    assert "| 16 | 32 | 100 | 250 |" in tables.serving_tables(result)
    assert "2.50" in tables.serving_tables(result)
    faster = {**row, "output_tokens_per_s": 300.0}
    result["arms"]["portfolio"] = {**result["arms"]["tuned"], "backend": "portfolio", "rows": [faster]}
    text = tables.serving_tables(result)
    assert "| 16 | 32 | 100 | 250 | 300 |" in text and "| 2.50 | 1.20 |" in text
    assert "tuned (flashinfer_cutlass) 45.0 s" in text and "portfolio (portfolio)" in text


def test_dense_tables_name_what_could_not_be_measured():
    result = {
        "bounds": {"bytes_per_s": 4e12, "flops_per_s": 8e14},
        "rows": [
            {
                "projection": "qkv",
                "tokens": 1,
                "bound_us": 5.0,
                "torch_us": 10.0,
                "cublaslt_us": 9.0,
                "cublaslt_tuned_us": 8.0,
                "cudnn_note": "ImportError: no cudnn",
            }
        ],
    }
    text = tables.dense_tables(result)
    assert "cublaslt tuned us" in text and "- cudnn: ImportError: no cudnn" in text


def test_piece_overlap_times_the_schedulers_own_decode_steps(tmp_path):
    runner = build_runner(server_args(tmp_path, disable_flashinfer_autotune=True))
    num_tokens, num_rows = runner.allocator.available(), runner.req_to_token_pool.available()
    runner.decode_graphs = DecodeGraphs(
        (1, 4),
        TorchNativeAttention(runner.req_to_token_pool, runner.kv_pool),
        runner.forward_into,
        264,
        CPU,
        lambda run: run,  # stands for a capture: the replay runs the forward again
        runner.plan_fence,
    )
    for force in ("0", "1"):
        with envs.SGLANG_OVERLAP_SCHEDULE_ON_CPU.override(force):
            times = overlap.step_times(runner, 3, input_len=20)
        assert 0 < times["forward_ms"] < times["step_ms"]
        assert 0 < times["gap_share"] < 1
    assert (runner.allocator.available(), runner.req_to_token_pool.available()) == (num_tokens, num_rows)


def test_overlap_tables_show_both_schedules_and_the_gap():
    served = {"concurrency": 16, "requests": 32, "output_tokens_per_s": 250.0, "itl_ms": 4.0}
    step = {
        "batch_size": 64,
        "bound_ms": 8.0,
        "forward_ms": 9.5,
        "step_ms": 10.0,
        "gap_ms": 0.5,
        "gap_share": 0.05,
    }
    result = {
        "input_len": 512,
        "output_len": 128,
        "requests_per_client": 2,
        "arms": {
            "overlap": {"rows": [served]},
            "in turn": {"rows": [{**served, "output_tokens_per_s": 200.0}]},
        },
        "bounds": {"bytes_per_s": 4.3e12, "flops_per_s": 7.9e14},
        "seq_len": 544,
        "steps": [{"arm": "overlap", **step}, {"arm": "in turn", **step, "gap_share": 0.2}],
    }
    text = tables.overlap_tables(result)
    assert "| 16 | 32 | 250 | 200 |" in text and "5.0%" in text and "20.0%" in text and "0.80" in text


async def stream_of(lines, port_of, request_of):
    """Stands where a server would: it answers one connection with `lines`, as chunks."""

    async def answer(reader, writer):
        request_of.set_result(
            await reader.readuntil(b"]}") if not lines[0].startswith(b"HTTP/1.1 4") else b""
        )
        for line in lines:
            writer.write(line)
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port_of.set_result(server.sockets[0].getsockname()[1])
    return server


def completed(lines, output_len=2):
    async def run():
        loop = asyncio.get_running_loop()
        port, request = loop.create_future(), loop.create_future()
        async with await stream_of(lines, port, request):
            wanted = load.Load(1, 1, 2, output_len, 264)
            return await load._run(Address("127.0.0.1", await port), wanted), await request

    return asyncio.run(asyncio.wait_for(run(), 20))


def chunk(event):
    text = b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(text), text)


END = b"0\r\n\r\n"
OK_HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN, USAGE = {"choices": [{"text": "t7"}]}, {"choices": [], "usage": {"completion_tokens": 2}}


def test_the_load_generator_times_the_first_token_and_those_after_it():
    answer, request = completed([OK_HEAD, chunk(TOKEN), chunk(TOKEN), chunk(USAGE), END])
    assert answer["output_tokens"] == 2 and 0 < answer["ttft_ms"] < 60_000 and 0 < answer["itl_ms"] < 60_000
    assert b'"max_tokens":2' in request and b'"stream":true' in request


def test_the_load_generator_passes_on_what_a_server_complains_of():
    with pytest.raises(RuntimeError, match="400 Bad Request: prompt too long"):
        completed([b"HTTP/1.1 400 Bad Request\r\ncontent-length: 15\r\n\r\nprompt too long"])
    with pytest.raises(RuntimeError, match="a request failed: worker died"):
        completed([OK_HEAD, chunk(TOKEN), chunk({"error": "worker died"})])
    with pytest.raises(RuntimeError, match="2 tokens instead of 9"):
        completed([OK_HEAD, chunk(TOKEN), chunk(USAGE), END], output_len=9)


def test_the_tokenizer_of_random_weights_shows_every_id_as_text(tmp_path):
    from sglang.srt.managers.tokenizer import TextTokenizer

    args = server_args(tmp_path)
    write_tokenizer(tmp_path / "model", 264)
    assert TextTokenizer.load(args).decode([3, 263]) == "t3 t263"


def test_results_are_plain_json(tmp_path):
    json.dumps(moe.measure_moe(TINY, 2, CPU, "reference", ["torch_grouped"], repeats=1), allow_nan=False)
    assert load.Load(1, 4, 8, 8, 264).num_requests == 4
