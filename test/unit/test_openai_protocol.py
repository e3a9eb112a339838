"""What a completion request may say, and how everything else is refused."""

from __future__ import annotations

import json

import pytest

from sglang.srt.entrypoints.openai.body import parse_body
from sglang.srt.entrypoints.openai.errors import ApiError
from sglang.srt.entrypoints.openai.protocol import COMPLETION_UNBUILT, CompletionRequest
from sglang.srt.sampling.sampling_params import SamplingParams, model_defaults


def parse(**fields) -> CompletionRequest:
    return parse_body(json.dumps({"prompt": "a", **fields}).encode(), CompletionRequest, COMPLETION_UNBUILT)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("text", ["text"]),
        (["one", "two"], ["one", "two"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_each_shape_of_prompt_is_a_list_of_prompts(prompt, prompts):
    assert parse(prompt=prompt).prompts() == prompts


@pytest.mark.parametrize("prompt", [["a", 1], [1, [2]], ["a", [1]]])
def test_a_prompt_that_mixes_shapes_is_refused(prompt):
    with pytest.raises(ApiError) as refused:
        parse(prompt=prompt).prompts()
    assert (refused.value.status, refused.value.param) == (400, "prompt")


def test_a_null_stands_for_the_default():
    nulls = dict.fromkeys(
        [
            "max_tokens",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "n",
            "seed",
            "stop",
            "echo",
            "stream",
            "logprobs",
        ]
    )
    request = parse(**nulls)
    assert (
        request.sampling(SamplingParams())
        == parse().sampling(SamplingParams())
        == SamplingParams(max_new_tokens=16)
    )
    assert request.num_copies == 1


def test_parameters_reach_the_sampler():
    sampling = parse(
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        frequency_penalty=0.5,
        presence_penalty=-1,
        repetition_penalty=1.2,
        logit_bias={"5": 2},
        seed=4,
        stop="x",
        stop_token_ids=[7],
        ignore_eos=True,
    ).sampling(SamplingParams())
    assert sampling == SamplingParams(
        max_new_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        frequency_penalty=0.5,
        presence_penalty=-1.0,
        repetition_penalty=1.2,
        logit_bias={5: 2.0},
        seed=4,
        stop=["x"],
        stop_token_ids=[7],
        ignore_eos=True,
    )


def test_a_model_may_bring_defaults_of_its_own_which_a_request_overrides():
    defaults = SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
    assert parse().sampling(defaults) == SamplingParams(
        max_new_tokens=16, temperature=0.6, top_k=20, top_p=0.95
    )
    assert parse(temperature=0, top_k=-1).sampling(defaults).top_k == -1
    assert parse(temperature=0).sampling(defaults).temperature == 0
    assert parse(temperature=None).sampling(defaults).temperature == 0.6


@pytest.mark.parametrize(
    ("config", "params"),
    [
        ({}, SamplingParams()),
        (
            {"do_sample": False, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "eos_token_id": [1]},
            SamplingParams(temperature=0.7, top_p=0.8, top_k=20),
        ),
        ({"top_k": 0, "min_p": None, "repetition_penalty": 1.05}, SamplingParams(repetition_penalty=1.05)),
    ],
)
def test_generation_config_gives_the_defaults_that_shape_the_distribution(config, params):
    assert model_defaults(config) == params


@pytest.mark.parametrize("config", [{"temperature": "warm"}, {"top_p": 7}])
def test_a_wrong_generation_config_names_the_file_and_the_remedy(config):
    with pytest.raises(ValueError, match="generation_config.json.*--sampling-defaults openai"):
        model_defaults(config)


def test_an_integer_is_fine_where_a_number_is_expected():
    assert parse(temperature=1, top_p=1).sampling(SamplingParams()).temperature == 1.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", "ten"),
        ("temperature", -1),
        ("temperature", "warm"),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 0),
        ("top_k", -2),
        ("min_p", 2),
        ("seed", 2**70),
        ("n", 1.5),
        ("stop", 3),
        ("stream", "yes"),
    ],
)
def test_a_value_out_of_range_or_of_a_wrong_type_is_refused_by_name(name, value):
    with pytest.raises(ApiError) as refused:
        parse(**{name: value}).sampling(SamplingParams())
    assert (refused.value.status, refused.value.param) == (400, name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 3),
        ("suffix", "end"),
        ("regex", "a+"),
        ("min_tokens", 2),
    ],
)
def test_a_parameter_that_would_change_the_answer_but_is_not_built_is_refused(name, value):
    with pytest.raises(ApiError) as refused:
        parse(**{name: value})
    assert (refused.value.status, refused.value.param) == (400, name)


def test_values_that_ask_for_nothing_and_unknown_fields_pass():
    parse(best_of=1, suffix="", min_tokens=0, response_format={"type": "text"}, user="me", foo=[1])


@pytest.mark.parametrize("body", [b"", b" \n", b"{", b"[]", b"3", b"\xff\xfe", b"{}", b'{"prompt": NaN}'])
def test_anything_but_a_json_object_with_a_prompt_is_refused(body):
    with pytest.raises(ApiError) as refused:
        parse_body(body, CompletionRequest, COMPLETION_UNBUILT)
    assert refused.value.status == 400


def test_too_many_sequences_are_refused_before_they_start():
    with pytest.raises(ApiError):
        parse(n=5000).check()
    with pytest.raises(ApiError):
        parse(prompt=["a"] * 100, n=100).check()


def test_an_error_has_the_four_fields_that_clients_read():
    body = ApiError(404, "no such thing", param="model", code="model_not_found").body()
    assert body == {
        "error": {
            "message": "no such thing",
            "type": "not_found_error",
            "param": "model",
            "code": "model_not_found",
        }
    }
