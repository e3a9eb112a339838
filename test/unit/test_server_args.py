"""The server's flags: what they accept, what they refuse and in which words."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang.srt.flags import flag_fields, flag_name
from sglang.srt.server_args import ServerArgs, prepare_server_args, server_args_parser
from sglang.srt.unbuilt_flags import REFUSED, WARNED


def parse(line: str) -> ServerArgs:
    return prepare_server_args(line.split())


def error_of(line: str) -> str:
    with pytest.raises(ValueError) as caught:
        parse(line)
    return str(caught.value)


def test_no_flags_serve_the_builtin_model():
    args = parse("")
    assert args.uses_builtin_model
    assert args.model_name == "builtin"
    assert args.tokenizer == args.model_path
    assert (args.host, args.port) == ("127.0.0.1", 30000)
    assert args == ServerArgs()


def test_builtin_is_also_a_model_path():
    assert parse("--model-path builtin").uses_builtin_model


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("--model /m", "model_path", "/m"),
        ("--tp 4", "tp_size", 4),
        ("--tensor-parallel-size 4", "tp_size", 4),
        ("--pp 2", "pp_size", 2),
        ("--ep 2 --tp 2", "ep_size", 2),
        ("--dtype half", "dtype", "float16"),
        ("--kv-cache-dtype bf16", "kv_cache_dtype", "bfloat16"),
        ("--cuda-graph-bs 1 2 4", "cuda_graph_bs_decode", [1, 2, 4]),
        ("--cuda-graph-max-bs 64", "cuda_graph_max_bs_decode", 64),
        ("--port=31100", "port", 31100),
        ("--chunked-prefill-size -1", "chunked_prefill_size", -1),
        ("--enable-metrics", "enable_metrics", True),
        ("--flashinfer-autotune-skip-ops a b", "flashinfer_autotune_skip_ops", ["a", "b"]),
    ],
)
def test_spelling_sets_field(line: str, field: str, value: object):
    assert getattr(parse(line), field) == value


def test_list_flag_given_twice_collects():
    args = parse("--flashinfer-autotune-skip-ops a --port 1 --flashinfer-autotune-skip-ops b")
    assert args.flashinfer_autotune_skip_ops == ["a", "b"]


def test_list_flags_are_not_shared_between_instances():
    ServerArgs().flashinfer_autotune_skip_ops.append("op")
    assert ServerArgs().flashinfer_autotune_skip_ops == []


def test_every_flag_has_help_and_a_group():
    for field, spec in flag_fields(ServerArgs):
        assert spec.help.endswith("."), field.name
        assert spec.group, field.name


def test_help_lists_every_flag():
    text = server_args_parser().format_help()
    for field, spec in flag_fields(ServerArgs):
        for name in (flag_name(field.name), *spec.aliases):
            assert name in text


def test_no_flag_is_both_built_and_unbuilt():
    built = {
        name for field, spec in flag_fields(ServerArgs) for name in (flag_name(field.name), *spec.aliases)
    }
    assert not built & (WARNED.keys() | REFUSED.keys())
    assert not WARNED.keys() & REFUSED.keys()


# Wrong values


@pytest.mark.parametrize("size", ["tp-size", "pp-size", "ep-size", "attn-dp-size", "dp-size", "nnodes"])
def test_parallel_size_below_one_is_refused(size: str):
    assert error_of(f"--{size} 0") == f"--{size} must be at least 1 (got 0)"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--tp-size two", "--tp-size/--tp/--tensor-parallel-size: invalid integer value: 'two'"),
        ("--port 70000", "--port must be at most 65535 (got 70000)"),
        ("--port 99999999", "--port must be at most 65535 (got 99999999)"),
        ("--port", "--port: expected one argument"),
        ("--max-total-tokens 1", "--max-total-tokens must be at least 2 (got 1)"),
        ("--mem-fraction-static 1", "--mem-fraction-static must lie between 0 and 1 (got 1)"),
        ("--mem-fraction-static nan", "--mem-fraction-static must lie between 0 and 1 (got nan)"),
        ("--dist-timeout nan", "--dist-timeout must be a number (got nan)"),
        (
            "--chunked-prefill-size 0",
            "--chunked-prefill-size must be at least 1, or -1 to turn chunking off (got 0)",
        ),
        ("--cuda-graph-bs-decode 4 0", "--cuda-graph-bs-decode must be at least 1 (got 0)"),
        ("--cuda-graph-bs-decode 4 4", "--cuda-graph-bs-decode names a size twice (got 4 4)"),
        ("--context-length 0", "--context-length must be at least 1 (got 0)"),
        ("--json-model-override-args [1]", "--json-model-override-args must be a JSON object (got [1])"),
        (
            "--flashinfer-autotune-records /no/such",
            "--flashinfer-autotune-records: there is no file /no/such",
        ),
        (
            "--device cpu --attention-backend flashinfer",
            "--attention-backend flashinfer needs a GPU: leave it out with --device cpu",
        ),
        ("stray", "unexpected argument 'stray': every option is given as --flag value (see --help)"),
    ],
)
def test_wrong_value_is_refused_by_name(line: str, message: str):
    assert error_of(line) == message


def test_value_outside_the_choices_is_refused_with_the_choices():
    assert "'auto', 'cuda', 'cpu'" in error_of("--device tpu").replace(
        "auto, cuda, cpu", "'auto', 'cuda', 'cpu'"
    )
    with pytest.raises(ValueError, match="--device must be one of auto, cuda, cpu"):
        ServerArgs(device="tpu")


def test_malformed_overrides_are_refused():
    assert error_of("--json-model-override-args {a}").startswith(
        "--json-model-override-args is not valid JSON"
    )


def test_overrides_are_a_dict():
    assert ServerArgs(json_model_override_args='{"num_hidden_layers": 2}').model_overrides == {
        "num_hidden_layers": 2
    }


# Parallel sizes


def test_derived_parallel_sizes():
    args = parse("--tp-size 8 --pp-size 2 --attn-dp-size 4 --ep-size 2")
    assert (args.world_size, args.attn_tp_size, args.moe_tp_size) == (16, 2, 4)


@pytest.mark.parametrize("flag", ["--ep-size", "--attn-dp-size"])
def test_size_that_does_not_divide_tp_is_refused(flag: str):
    assert error_of(f"--tp-size 4 {flag} 3") == f"{flag} must divide --tp-size (got 3 and 4)"


def test_dp_attention_is_the_older_spelling_of_attn_dp_size():
    assert parse("--tp 4 --dp 2 --enable-dp-attention").attn_dp_size == 2


def test_dp_size_without_dp_attention_is_refused_with_the_remedy():
    message = error_of("--tp 4 --dp-size 2")
    assert "--enable-dp-attention" in message and "--attn-dp-size 2" in message


def test_two_spellings_that_disagree_are_refused():
    assert "disagree" in error_of("--tp 4 --dp-size 2 --enable-dp-attention --attn-dp-size 4")


def test_limit_below_one_per_attention_replica_is_refused():
    assert error_of("--tp 4 --attn-dp-size 4 --max-running-requests 3") == (
        "--max-running-requests must be at least --attn-dp-size (got 3 and 4)"
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--node-rank 1", "--node-rank must be less than --nnodes"),
        ("--nnodes 2 --tp 3 --dist-init-addr h:1", "--nnodes must divide"),
        ("--nnodes 2 --tp 2", "needs --dist-init-addr"),
        ("--dist-init-addr host", "--dist-init-addr must be HOST:PORT"),
        ("--dist-init-addr host:99999", "--dist-init-addr must be HOST:PORT"),
        ("--dist-init-addr ::1:80", "--dist-init-addr must be HOST:PORT"),
    ],
)
def test_wrong_node_settings_are_refused(line: str, words: str):
    assert words in error_of(line)


def test_two_nodes_parse():
    args = parse("--nnodes 2 --node-rank 1 --tp 4 --dist-init-addr [::1]:5000")
    assert (args.nnodes, args.node_rank, args.dist_init_addr) == (2, 1, "[::1]:5000")


# Device-dependent defaults


def test_defaults_depend_on_the_device_and_are_not_written_back():
    args = ServerArgs()
    assert (args.dtype_on("cpu"), args.dtype_on("cuda")) == ("float32", "auto")
    assert (args.chunked_prefill_size_on("cpu"), args.chunked_prefill_size_on("cuda")) == (2048, 8192)
    assert (args.attention_backend_on("cpu"), args.attention_backend_on("cuda")) == (
        "torch_native",
        "flashinfer",
    )
    assert (args.moe_runner_backend_on("cpu"), args.moe_runner_backend_on("cuda")) == (
        "reference",
        "flashinfer_cutlass",
    )
    assert args == ServerArgs()


def test_given_values_win_over_the_device_defaults():
    args = parse("--dtype bfloat16 --chunked-prefill-size 64 --moe-runner-backend torch_grouped")
    assert args.dtype_on("cpu") == "bfloat16"
    assert args.chunked_prefill_size_on("cpu") == 64
    assert args.moe_runner_backend_on("cpu") == "torch_grouped"
    assert parse("--chunked-prefill-size -1").chunked_prefill_size_on("cuda") is None


# Flags that are not built here


def test_unknown_flag_suggests_the_nearest():
    assert error_of("--tp-sise 2") == "unknown flag --tp-sise: did you mean --tp-size?"
    assert error_of("--flashinfer-autotune-skip-op x").endswith(
        "did you mean --flashinfer-autotune-skip-ops?"
    )


def test_unknown_flag_like_nothing_points_to_the_help():
    assert error_of("--zzz=1") == "unknown flag --zzz: see --help for the flags there are"


def test_abbreviation_is_not_taken_for_a_flag():
    assert error_of("--model-pa /m").startswith("unknown flag --model-pa")


def test_harmless_sglang_flag_is_ignored_with_one_warning(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        args = parse("--schedule-policy lpm --port 1234 --schedule-policy=fcfs --enable-cache-report --tp 2")
    assert (args.port, args.tp_size) == (1234, 2)
    assert [record.getMessage().split()[0] for record in caplog.records] == [
        "--schedule-policy",
        "--enable-cache-report",
    ]


def test_ignored_flag_takes_its_arguments_along():
    args = parse("--bucket-time-to-first-token 1 2 -3 --port 1234")
    assert args.port == 1234


def test_sglang_flag_that_changes_results_is_refused():
    assert error_of("--lora-paths a b --port 1") == (
        "--lora-paths is a flag of SGLang that is not built here: leave it out"
    )
    assert error_of("--speculative-algorithm=EAGLE").startswith("--speculative-algorithm is a flag")


# Import weight


def test_parsing_imports_no_heavy_library():
    code = (
        "import sys; from sglang.srt.server_args import prepare_server_args, server_args_parser; "
        "args = prepare_server_args(['--tp', '2']); server_args_parser().format_help(); "
        "from sglang.srt.configs.model_config import ModelConfig; "
        "print([m for m in ('torch', 'transformers', 'flashinfer', 'numpy', 'huggingface_hub') if m in sys.modules])"
    )
    python_dir = str(Path(__file__).resolve().parents[2] / "python")
    environment = {**os.environ, "PYTHONPATH": python_dir}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=150, env=environment, check=True
    )
    assert result.stdout.strip() == "[]"
