import json
from pathlib import Path
from typing import Any

import pytest
import typer

from lorafleet.cluster.cli.cli import app, spread_values
from lorafleet.cluster.config import AppArgs, LoRAModule, keys_from, parse_args, with_keys
from lorafleet.protocol.engine_config import EngineConfig, EngineOptions, SpeculativeConfig
from lorafleet.protocol.errors import ConfigError
from lorafleet.protocol.lora_config import LoRAConfig, LoRAOptions
from lorafleet.protocol.options import options_of
from lorafleet.protocol.sources import HTTPConfig, HubConfig, S3Config, SourcesConfig


def test_the_engine_and_lora_settings_arrive_by_name() -> None:
    of_dtypes = {"lora_dtype": "float32", "kv_cache_dtype": "fp8", "quantization": "nf4"}
    args = parse_args({"model": "m", "max_num_seqs": 7, "max_loras": 3} | of_dtypes)
    config = args.engine_config()
    assert config.lora is not None
    assert (config.max_num_seqs, config.lora.max_loras, config.lora.lora_dtype) == (7, 3, "float32")
    assert (config.kv_cache_dtype, config.quantization) == ("fp8", "nf4")


def test_a_server_has_the_defaults_of_its_engine_except_that_its_queues_are_bounded() -> None:
    queues = {"max_queued_requests": 512, "max_queued_tokens": 2_000_000}
    assert parse_args({"model": "m"}).engine_config() == EngineConfig("m", lora=LoRAConfig(), **queues)


def test_the_schema_has_the_descriptions_of_the_engines_and_adapters_options() -> None:
    properties = AppArgs.model_json_schema()["properties"]
    for kind in (EngineOptions, LoRAOptions):
        for name, option in options_of(kind).items():
            assert properties[name]["description"] == option.description


@pytest.mark.parametrize("as_text", [False, True])
def test_speculative_decoding_is_configured_by_vllms_json_or_by_fields(as_text: bool) -> None:
    given = {"method": "ngram", "num_speculative_tokens": 3}
    args = parse_args({"model": "m", "speculative_config": json.dumps(given) if as_text else given})
    assert args.engine_config().speculative_config == SpeculativeConfig("ngram", num_speculative_tokens=3)
    assert parse_args({"model": "m"}).engine_config().speculative_config is None
    args = parse_args({"model": "m", "speculative_config": {"method": "qwen3_5_mtp"}})
    assert args.engine_config().speculative_config == SpeculativeConfig("mtp")


def test_a_configuration_of_drafts_that_is_no_json_is_named() -> None:
    with pytest.raises(ConfigError, match="speculative_config: 'ngram' is not valid JSON"):
        parse_args({"model": "m", "speculative_config": "ngram"})


def test_keys_come_from_the_environment_unless_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"LORAFLEET_ADMIN_KEY": "of-the-environment", "LORAFLEET_API_KEYS": "keys.yaml", "HOME": "/"}
    keys = {"admin_key": "of-the-environment", "api_keys": "keys.yaml"}
    assert keys_from(environment) == keys
    args = with_keys(parse_args({"model": "m", "num_replicas": 2}), environment)
    assert (args.admin_key, args.api_keys, args.num_replicas) == (
        "of-the-environment",
        str(Path("keys.yaml").absolute()),
        2,
    )
    assert "of-the-environment" not in repr(args)
    given = with_keys(parse_args({"model": "m", "admin_key": "of-the-file", "api_keys": None}), environment)
    assert (given.admin_key, given.api_keys) == ("of-the-file", None)
    with pytest.raises(ConfigError, match="admin_key"):
        with_keys(args=parse_args({"model": "m"}), environment={"LORAFLEET_ADMIN_KEY": "short"})
    monkeypatch.setenv("LORAFLEET_ADMIN_KEY", "of-the-environment")
    assert parse_args({"model": "m"}).admin_key is None


def test_the_bounds_of_the_queue_arrive_where_they_are_kept() -> None:
    args = parse_args({"model": "m", "max_queued_requests": 7, "max_queued_tokens": 900, "queue_timeout": 2.5})
    assert (args.engine_config().max_queued_requests, args.queue_timeout) == (7, 2.5)
    assert args.engine_config().max_queued_tokens == 900
    assert parse_args({"model": "m", "max_queued_requests": None}).engine_config().max_queued_requests is None


def test_without_lora_there_is_no_lora_config() -> None:
    assert parse_args({"model": "m", "enable_lora": False}).engine_config().lora is None


def test_tensor_parallel_has_sglangs_short_name() -> None:
    for name in ("tp", "tensor_parallel_size"):
        assert parse_args({"model": "m", name: 4}).engine_config().tensor_parallel_size == 4


def test_modules_are_read_in_every_spelling() -> None:
    given = ["a=/x", '{"name": "b", "path": "/y", "base_model_name": "m"}', {"lora_name": "c", "lora_path": "/z"}]
    modules = parse_args({"model": "m", "lora_paths": given}).lora_modules
    assert modules == [
        LoRAModule(name="a", path="/x"),
        LoRAModule(name="b", path="/y", base_model_name="m"),
        LoRAModule(name="c", path="/z"),
    ]


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"model": "m", "max_lora_rnak": 8}, "did you mean 'max_lora_rank'"),
        ({"model": "m", "zzz": 8}, "unknown argument 'zzz'"),
        ({"modle": "m"}, "did you mean 'model'"),
        ({"model": "m", "num_replicas": "two"}, "num_replicas"),
        ({"model": "m", "device": "tpu"}, "device"),
        ({"model": "m", "tp": 0}, "tensor_parallel_size"),
        ({"model": "m", "queue_timeout": -1}, "queue_timeout"),
        ({"model": "m", "drain_timeout": float("inf")}, "drain_timeout: Input should be a finite number"),
        ({"model": "m", "served_model_name": ["a", ""]}, "served_model_name has an empty name"),
        ({"model": "m", "lora_modules": ["nothing"]}, "name=path"),
        ({"model": "m", "lora_modules": ["{nothing"]}, "not valid JSON"),
        ({"model": "m", "lora_modules": [{"name": "a", "path": "x", "rank": 3}]}, "rank"),
        ({"model": "m", "lora_modules": ["a=x", "a=y"]}, "twice"),
        ({"model": "m", "lora_modules": ["m=x"]}, "base model's name"),
        ({"model": "m", "lora_modules": ["a=x"], "enable_lora": False}, "enable_lora"),
        ({"model": "m", "max_lora_rank": 8, "enable_lora": False}, "max_lora_rank has no effect without enable_lora"),
        ({"model": "m", "lora_resolver_dir": "/a", "enable_lora": False}, "lora_resolver_dir has no effect"),
        ({"model": "m", "on_lora_load_failure": "base", "enable_lora": False}, "on_lora_load_failure has no effect"),
        ({"model": "m", "lora_neighbors": False, "enable_lora": False}, "lora_neighbors has no effect"),
        ({"model": "m", "max_loras": 2, "max_loras_per_batch": 3}, "same setting"),
        (
            {"model": "m", "lora_resolver_s3": {"uri": "s3://b/{lora_name}", "endpoint": "x"}},
            "lora_resolver_s3.endpoint",
        ),
        ({"model": "m", "lora_resolver_s3": "s3://b/adapters"}, "lacks {lora_name}"),
        ({"model": "m", "lora_resolver_http": "{nothing"}, "not valid JSON"),
        ({"model": "m", "lora_resolver_hub": {}}, "lora_resolver_hub.allow"),
        ({"model": "m", "lora_resolvers": ["s3"]}, "'s3', which needs lora_resolver_s3"),
        ({"model": "m", "lora_resolvers": ["p", "p"]}, "'p' twice"),
        ({"model": "m", "lora_cache_bytes": 0}, "lora_cache_bytes"),
    ],
)
def test_a_mistake_is_an_error_that_names_it(values: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_args(values)


def test_sources_are_text_or_fields() -> None:
    args = parse_args(
        {
            "model": "m",
            "lora_resolver_s3": "s3://b/{lora_name}",
            "lora_resolver_http": '{"allow": ["https://host/"], "timeout_s": 5}',
            "lora_resolver_hub": "org/*",
            "lora_cache_dir": "/cache",
            "lora_cache_bytes": 10,
        }
    )
    assert args.sources == SourcesConfig(
        S3Config("s3://b/{lora_name}"),
        HTTPConfig(allow=("https://host/",), timeout_s=5),
        HubConfig(("org/*",)),
        "/cache",
        10,
    )
    assert args.engine_config().sources == args.sources
    assert args.resolver_templates == {"s3": "s3://b/{lora_name}", "hub": "hf://{lora_name}"}


def test_resolvers_are_asked_in_the_order_given() -> None:
    given = {
        "model": "m",
        "lora_resolver_dir": "/a",
        "lora_resolver_s3": "s3://b/{lora_name}",
        "lora_resolver_hub": "o/*",
    }
    assert parse_args(given).resolver_order == ["filesystem", "s3", "hub"]
    ordered = parse_args(given | {"lora_resolvers": ["hub", "plugin", "filesystem"]})
    assert ordered.resolver_order == ["s3", "hub", "plugin", "filesystem"]


def test_nodes_are_asked_for_adapters_unless_it_is_turned_off() -> None:
    assert parse_args({"model": "m"}).has_neighbors, "a deploy may add replicas beside this one"
    assert not parse_args({"model": "m", "lora_neighbors": False}).has_neighbors
    assert not parse_args({"model": "m", "enable_lora": False}).has_neighbors


def test_every_option_has_a_flag() -> None:
    command: Any = typer.main.get_command(app)
    assert {param.name for param in command.commands["serve"].params} >= set(AppArgs.model_fields)


def test_several_values_may_follow_one_flag() -> None:
    assert spread_values(["serve", "--lora-modules", "a=x", "b=y", "--port", "1"]) == [
        *("serve", "--lora-modules", "a=x", "--lora-modules", "b=y", "--port", "1")
    ]
    assert spread_values(["serve", "--host", "a", "b"]) == ["serve", "--host", "a", "b"]


@pytest.mark.parametrize("option", ["catalog_uri", "batch_store"])
def test_a_store_of_an_unknown_kind_is_refused_before_anything_starts(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option}.*'file:///a' is neither a folder nor s3://bucket/prefix"):
        parse_args({"model": "m", option: "file:///a"})
    for uri in ("s3://bucket/prefix", "/a/folder"):
        assert getattr(parse_args({"model": "m", option: uri}), option) == uri
