"""What docs/compatibility.md says: which flags, endpoints and parameters of SGLang work here, warn or fail.

The tables are read from the code that decides; only the notes are written here.
"""

from __future__ import annotations

import msgspec

from sglang.srt.entrypoints.native.protocol import (
    GENERATE_UNBUILT,
    SAMPLING_UNBUILT,
    GenerateRequest,
    NativeSampling,
)
from sglang.srt.entrypoints.openai.chat_protocol import CHAT_UNBUILT, ChatCompletionRequest
from sglang.srt.entrypoints.openai.protocol import COMPLETION_UNBUILT, CompletionRequest
from sglang.srt.flags import flag_fields, flag_name
from sglang.srt.server_args import ServerArgs
from sglang.srt.unbuilt_flags import REFUSED, WARNED

ENDPOINTS: dict[str, str] = {
    "/autotune": "GET: the autotune report as a page; not SGLang's",
    "/flush_cache": "GET and POST; 400 while requests run or wait",
    "/generate": "POST and PUT: text or token ids, one or a batch, streamed or not",
    "/get_model_info": "GET: the older name of `/model_info`",
    "/get_server_info": "GET: the older name of `/server_info`",
    "/health": "GET: whether requests are served; generates nothing",
    "/health_generate": "GET: whether a token comes",
    "/metrics": "GET: with `--enable-metrics`",
    "/model_info": "GET",
    "/openapi.json": "GET",
    "/server_info": "GET: flags, state, the autotune report, the schedulers' counts",
    "/v1/chat/completions": "POST: text, streamed or not",
    "/v1/completions": "POST: text or token ids, one or a batch, streamed or not",
    "/v1/models": "GET",
    "/v1/models/{name}": "GET",
}
"""Everything that is served, with its methods."""

UNBUILT_ENDPOINTS = (
    "/abort_request",
    "/classify",
    "/configure_logging",
    "/continue_generation",
    "/detokenize",
    "/encode",
    "/get_load",
    "/get_weights_by_name",
    "/init_weights_update_group",
    "/load_lora_adapter",
    "/open_session",
    "/pause_generation",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/set_internal_state",
    "/start_expert_distribution_record",
    "/start_profile",
    "/stop_profile",
    "/tokenize",
    "/update_weights_from_disk",
    "/update_weights_from_tensor",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/rerank",
    "/v1/responses",
    "/v1/score",
    "/v1/tokenize",
)
"""SGLang's endpoints that answer 404 here."""

_NOTES: dict[str, str] = {
    "echo": "with `logprobs` it scores the prompt too",
    "frequency_penalty": "-2 to 2; counts generated tokens, not the prompt's",
    "input_ids": "token ids, or a list of lists of them",
    "logit_bias": "-100 to 100, by token id",
    "logprob_start_len": "first prompt token that is scored; -1, the default, scores none",
    "logprobs": "a number with completions, a switch with chat",
    "max_completion_tokens": "goes before `max_tokens`",
    "max_new_tokens": "128 unless given; null is no limit",
    "max_tokens": "16 unless given with completions, no limit with chat",
    "model": "the served name, the model path or `default`; another name is 404",
    "presence_penalty": "-2 to 2; counts generated tokens, not the prompt's",
    "reasoning_effort": "reaches the chat template",
    "repetition_penalty": "above 0, at most 2; counts generated tokens, not the prompt's",
    "rid": "comes back as `meta_info.id`",
    "seed": "the text is then a function of prompt, parameters and seed, whatever else runs",
    "stop_token_ids": "the token is counted and listed, and no part of the text",
    "stream_options": "`include_usage`, `continuous_usage_stats`",
    "top_logprobs": "at most 128",
    "top_logprobs_num": "at most 128",
}

_CLIENTS = (
    (
        "`openai` 3.57 (Python)",
        "completions, chats, streams, log-probabilities, models, errors",
        "in `test/e2e`",
    ),
    (
        "lm_eval 0.4.13, `local-completions`",
        "50 sums as multiple choice (as text and as token ids, one and 8 at a time) and as generation",
        "accuracy 1.0, exact match 1.0",
    ),
    ("lm_eval 0.4.13, `local-chat-completions`", "the same 50 sums as generation", "exact match 1.0"),
    (
        "SGLang 0.5.23's `bench_serving`",
        "`--backend sglang`, `sglang-oai` and `sglang-oai-chat`, 30 random prompts, 8 at a time",
        "30 of 30 each, all 358 tokens",
    ),
)

_PAGE = """\
# What of SGLang works here

The tables of this page are written by `make docs` from the code that decides. `works` means with SGLang's meaning;
`refused` is an answer 400 that names the field, unless its value asks for nothing; `-` is a field that the endpoint
does not know.

## Endpoints

| endpoint | served |
|---|---|
{endpoints}

Others of SGLang answer 404: {unbuilt_endpoints}.

Every error is `{{"error": {{"message", "type", "param", "code"}}}}`, on SGLang's own endpoints too.

## Request fields

Fields that nobody knows are ignored, as SGLang does; an unknown name in `sampling_params` is refused.

| field | `/generate` | its `sampling_params` | `/v1/completions` | `/v1/chat/completions` | note |
|---|---|---|---|---|---|
{fields}

## What is meant a little differently

- **Log-probabilities** are those of the model's own logits, before penalties, biases, temperature and truncation.
  The first token of a prompt has none. `input_token_logprobs` has a value for the token at `logprob_start_len` too,
  unless it is the first.
- **Defaults** of sampling are the model's `generation_config.json`, as with SGLang (`--sampling-defaults`).
- **top_k, top_p and min_p** are judged together on the distribution after temperature: their order does not matter.
- **Events of `/generate`** repeat text, token ids and log-probabilities from the beginning, as SGLang's do unless
  told otherwise.
- **`max_tokens` beyond the context** ends the answer at the context instead of refusing the request.
- **A model's name** that is not this server's is 404.

## Flags

Work, with SGLang's names, aliases and meanings (`cli.md` explains each): {flags}.

Warned about once and then ignored, since results are the same without them: {warned}.

Refused at start, since going on without them would be another server: {refused}.

An unknown flag is refused with the nearest one that there is.

## Clients that were run against it

With the built-in model on a CPU. `test/e2e` keeps the shapes of these requests, without the clients.

| client | what it ran | result |
|---|---|---|
{clients}

The command of the second row, where `sums_choice` and `sums_generate` are local tasks over a local JSON-lines file:

```bash
lm_eval --model local-completions --include_path . --tasks sums_choice,sums_generate --batch_size 8 --model_args \\
    model=builtin,base_url=http://127.0.0.1:30000/v1/completions,num_concurrent=2,tokenizer=MODEL_DIRECTORY
```

That of the last row, in an environment with SGLang's own package:

```bash
python -m sglang.bench_serving --backend sglang --base-url http://127.0.0.1:30000 --model builtin \\
    --tokenizer MODEL_DIRECTORY --dataset-name random-ids --random-input-len 64 --random-output-len 16 \\
    --random-range-ratio 0.5 --num-prompts 30 --max-concurrency 8
```
"""


def render() -> str:
    """The whole page."""
    flags = [flag_name(field.name) for field, _ in flag_fields(ServerArgs)]
    return _PAGE.format(
        endpoints="\n".join(f"| `{path}` | {text} |" for path, text in ENDPOINTS.items()),
        unbuilt_endpoints=_listed(UNBUILT_ENDPOINTS),
        fields="\n".join(_field_rows()),
        clients="\n".join(f"| {' | '.join(row)} |" for row in _CLIENTS),
        flags=_listed(flags),
        warned=_listed(sorted(WARNED)),
        refused=_listed(sorted(REFUSED)),
    )


def _field_rows() -> list[str]:
    tables = [
        (_names(GenerateRequest), GENERATE_UNBUILT),
        (_names(NativeSampling), SAMPLING_UNBUILT),
        (_names(CompletionRequest), COMPLETION_UNBUILT),
        (_names(ChatCompletionRequest), CHAT_UNBUILT),
    ]
    rows = []
    for name in sorted({name for built, unbuilt in tables for name in (*built, *unbuilt)}):
        states = [
            "works" if name in built else "refused" if name in unbuilt else "-" for built, unbuilt in tables
        ]
        rows.append(f"| `{name}` | {' | '.join(states)} | {_NOTES.get(name, '')} |")
    return rows


def _names(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return kind.__struct_fields__


def _listed(names: tuple[str, ...] | list[str]) -> str:
    return " ".join(f"`{name}`" for name in names)
