from __future__ import annotations

from collections.abc import Callable

import pytest

from lorafleet.protocol.errors import ConfigError
from lorafleet.protocol.sources import HTTPConfig, HubConfig, S3Config, SourcesConfig


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: S3Config(uri="https://b/{lora_name}"), "must begin with s3://"),
        (lambda: S3Config(uri="s3://b/{base_model_name}"), "lacks {lora_name}"),
        (lambda: S3Config(uri="s3://b/{lora_nam}"), "placeholders"),
        (lambda: S3Config(uri="s3://b/{lora_name!r}"), "placeholders"),
        (lambda: S3Config(uri="s3://b/{lora_name"), "stray brace"),
        (lambda: S3Config(timeout_s=0), "timeout_s is 0"),
        (lambda: S3Config(max_bytes=0), "max_bytes is 0"),
        (lambda: S3Config(anonymous=True, profile="p"), "anonymous"),
        (lambda: HTTPConfig(), "allows nothing"),
        (lambda: HTTPConfig(allow=("https://host",)), "ends in '/'"),
        (lambda: HTTPConfig(allow=("ftp://host/",)), "ends in '/'"),
        (lambda: HTTPConfig(allow=("https://",)), "ends in '/'"),
        (lambda: HTTPConfig(uri="https://host-{lora_name}"), "ends in '/'"),
        (lambda: HubConfig(allow=()), "allows nothing"),
        (lambda: HubConfig(allow=("org/*",), repo="org/one"), "lacks {lora_name}"),
        (lambda: SourcesConfig(cache_bytes=0), "lora_cache_bytes"),
    ],
)
def test_a_mistake_is_a_config_error_that_names_it(make: Callable[[], object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make()


def test_the_fixed_beginning_of_a_template_is_allowed_where_nothing_else_is_said() -> None:
    assert HTTPConfig(uri="https://host/a/x-{lora_name}").allowed == ("https://host/a/",)
    assert HTTPConfig(uri="https://host/a/{lora_name}", allow=("https://other/",)).allowed == ("https://other/",)
