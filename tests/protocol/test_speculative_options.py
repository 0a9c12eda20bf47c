"""The JSON of --speculative-config, as programs and servers give it."""

from __future__ import annotations

import pytest

from lorafleet.cluster.config import parse_args
from lorafleet.protocol.engine_config import EngineConfig, SpeculativeConfig
from lorafleet.protocol.errors import ConfigError


def test_it_is_vllms_dict_or_an_object_or_nothing() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 3}
    made = SpeculativeConfig("ngram", 5, 3, 3)
    assert SpeculativeConfig.of(given) == made
    assert SpeculativeConfig.of(made) is made
    assert SpeculativeConfig.of(None) is None


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"method": "ngram", "draft": "x"}, "'draft' is not known. Known: method, num_speculative_tokens"),
        ({"method": "ngram", "model": "x"}, "model='x' has no use with method='ngram'"),
        ({"method": "mtp", "model": "x"}, "model='x' has no use with method='mtp'"),
        ({"method": "mtp", "prompt_lookup_min": 3}, "have no use with method='mtp'"),
        ({"method": "grammar", "model": "x"}, "model='x' has no use with method='grammar'"),
        ({"method": "grammar", "prompt_lookup_max": 3}, "have no use with method='grammar'"),
        ({"method": "mimo_mtp"}, "method='mimo_mtp' is not served. The methods are 'grammar', 'ngram' and 'mtp'"),
        ({"method": "draft_model"}, "model=None must be the folder of a draft model"),
        ({"method": "draft_model", "model": "x", "prompt_lookup_max": 3}, "have no use with method='draft_model'"),
        ({"num_speculative_tokens": 4}, "method is missing. Give method='ngram'"),
        ({"method": "medusa", "model": "x"}, "method='medusa' is not served. The methods are 'grammar'"),
        ({"method": "eagle3"}, "model=None must be the folder of a draft model or head with method='eagle3'"),
        ({"method": "ngram", "num_speculative_tokens": 9}, r"num_speculative_tokens=9 must be an integer in \[1, 8\]"),
        ({"method": "ngram", "num_speculative_tokens": 0}, r"num_speculative_tokens=0 must be an integer in \[1, 8\]"),
        ({"method": "ngram", "num_speculative_tokens": 2.0}, "num_speculative_tokens=2.0 must be an integer"),
        ({"method": "ngram", "prompt_lookup_max": 17}, r"prompt_lookup_max=17 must be an integer in \[1, 16\]"),
        ({"method": "ngram", "prompt_lookup_min": 5}, "prompt_lookup_min=5 exceeds prompt_lookup_max=4"),
        ({"method": ["ngram"]}, r"method=\['ngram'\] is not served"),
        ({"method": "ngram", "num_speculative_tokens": "4"}, "num_speculative_tokens='4' must be an integer"),
        ({7: "ngram"}, "7 is not known"),
        (["ngram"], r"\['ngram'\].* is no JSON object"),
    ],
    ids=str,
)
def test_a_mistake_in_it_is_named_in_the_same_words_to_programs_and_at_a_servers_start(
    given: object, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        SpeculativeConfig.of(given)
    with pytest.raises(ConfigError, match=complaint):
        parse_args({"model": "m", "speculative_config": given})


def test_a_server_reads_it_from_json_as_well() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 5}'
    assert parse_args({"model": "m", "speculative_config": text}).speculative_config == SpeculativeConfig("ngram", 5)
    with pytest.raises(ConfigError, match="method='medusa' is not served"):
        parse_args({"model": "m", "speculative_config": '{"method": "medusa"}'})


@pytest.mark.parametrize(
    "name", ["mtp", "deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "qwen3_next_mtp", "qwen3_5_mtp"]
)
def test_vllms_names_of_mtp_mean_one_method(name: str) -> None:
    assert SpeculativeConfig.of({"method": name, "num_speculative_tokens": 2}) == SpeculativeConfig("mtp", 2)


def test_a_step_may_choose_more_tokens_than_it_has_sequences_only_with_drafts() -> None:
    ngram = SpeculativeConfig("ngram", num_speculative_tokens=4)
    assert EngineConfig("m", max_num_seqs=3).most_sampled == 3
    assert EngineConfig("m", max_num_seqs=3, speculative_config=ngram).most_sampled == 15
    assert EngineConfig("m", max_num_seqs=64, speculative_config=ngram).most_sampled == 320
    assert EngineConfig("m", max_num_seqs=256, speculative_config=ngram).most_sampled == 384
    assert EngineConfig("m", max_num_seqs=512, speculative_config=ngram).most_sampled == 512
    assert EngineConfig("m", max_num_seqs=3, max_num_batched_tokens=8, speculative_config=ngram).most_sampled == 8
