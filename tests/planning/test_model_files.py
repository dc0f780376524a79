"""Configurations of models whose layers are not those priced: refused, with what to do."""

import json

import pytest
from builders.commands import invoke

from fastcomm.errors import ConfigError
from fastcomm.models import load

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}


def config(tmp_path, keys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: keys[key] for key in keys if keys[key] != "absent"}))
    return path


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            LLAMA | {"num_hidden_layers": 10**9},
            "1000000000: expected a whole number from 1 to 1",
        ),
        (
            LLAMA | {"hidden_size": 10**18},
            "0000: expected a whole number from 1 to 1099511627776",
        ),
        (LLAMA | {"num_hidden_layers": -48}, "-48: expected a whole number from 1 to 16384"),
        (LLAMA | {"num_hidden_layers": 1.5}, "1.5: expected a whole number$"),
        (
            MOE | {"num_experts": "absent"},
            "num_experts_per_tok 8 without the number of experts",
        ),
        (MOE | {"num_experts": None}, "num_experts_per_tok 8 without the number of experts"),
        (
            MOE | {"num_experts": None, "num_experts_per_tok": None},
            "moe_intermediate_size 768 without the number of experts",
        ),
        (MOE | {"n_group": 8, "topk_group": 99}, "in n_group 8, of which topk_group is 99"),
        (MOE | {"n_group": 7, "topk_group": 2}, "128 experts in n_group 7"),
        (LLAMA | {"model_type": "mistral", "sliding_window": 4096}, "a sliding_window of 4096"),
        (
            LLAMA
            | {"sliding_window": 512, "layer_types": [*["sliding_attention"] * 5, "full"]},
            "a sliding_window of 512",
        ),
        ({"text_config": LLAMA, "model_type": "llama4"}, "nested in text_config"),
        *(
            (LLAMA | {"model_type": name}, f"layers of '?{name}'? are not understood")
            for name in ("mamba2", "falcon", "gemma3", "bloom", "falcon_mamba", "rwkv6")
        ),
        (
            LLAMA | {"model_type": "absent", "architectures": ["Mamba2ForCausalLM"]},
            "layers of '?Mamba2ForCausalLM'? are not understood",
        ),
    ],
)
def test_a_file_that_is_not_understood_is_refused(tmp_path, keys, message):
    path = config(tmp_path, keys)
    with pytest.raises(ConfigError, match=message):
        load(str(path))


@pytest.mark.parametrize(
    "name",
    ["LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM", "InternLM2ForCausalLM"],
)
def test_usual_families_are_read_by_type_or_class(tmp_path, name):
    by_class = LLAMA | {"model_type": "absent", "architectures": [name]}
    assert load(str(config(tmp_path, by_class))).layers == 32
    by_type = LLAMA | {"model_type": name.removesuffix("ForCausalLM").lower()}
    assert load(str(config(tmp_path, by_type))).hidden == 4096


@pytest.mark.parametrize(
    ("keys", "window"),
    [
        ({"sliding_window": None}, 0),
        ({"sliding_window": 4096, "use_sliding_window": False}, 0),
        ({"sliding_window": 131072, "max_position_embeddings": 131072}, 0),
        ({"sliding_window": 4096, "layer_types": ["full_attention"] * 32}, 0),
        (
            {
                "sliding_window": 128,
                "layer_types": ["sliding_attention", "full_attention"] * 16,
            },
            128,
        ),
    ],
)
def test_windows_that_are_priced_or_without_effect_are_read(tmp_path, keys, window):
    assert load(str(config(tmp_path, LLAMA | keys))).window == window


def test_a_model_that_says_it_has_no_experts_has_none(tmp_path):
    for number in (0, 1):
        assert load(str(config(tmp_path, MOE | {"num_experts": number}))).experts is None


def test_gpt2_is_launched_with_its_positions_and_tied_embeddings(tmp_path):
    sizes = {"n_embd": 1600, "n_head": 25, "n_layer": 48, "vocab_size": 50304}
    path = config(tmp_path, {"model_type": "gpt2", "activation_function": "gelu_new", **sizes})
    more = ("--cluster", "h100", "--seq-len", "1024", "--launch", "megatron")
    result = invoke("plan", "--model", path, "--gpus", "8", "--global-batch", "64", *more)
    assert "--position-embedding-type learned_absolute" in result.stdout
    assert "--untie-embeddings-and-output-weights" not in result.stdout
    assert "--swiglu" not in result.stdout
