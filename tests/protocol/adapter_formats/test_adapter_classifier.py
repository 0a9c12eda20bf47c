from __future__ import annotations

import json
from typing import Any

import pytest

from lorafleet.protocol.adapter_formats.adapter_classifier import MAX_LABELS, find_head, read_classifier
from lorafleet.protocol.adapter_formats.safetensors_header import TensorInfo
from lorafleet.protocol.errors import AdapterError, AdapterMalformed, AdapterTooLarge

SEQUENCE = {"task_type": "SEQ_CLS"}
WEIGHT = "base_model.model.score.weight"


def infos(**shapes: tuple[int, ...]) -> dict[str, TensorInfo]:
    """Returns tensors by name, of which each `_` stands for a dot."""
    return {f"base_model.model.{name.replace('_', '.')}": TensorInfo(shape, "F32") for name, shape in shapes.items()}


@pytest.mark.parametrize("name", ["score.weight", "classifier.weight", "score.modules_to_save.default.weight"])
@pytest.mark.parametrize("prefix", ["", "base_model.model."])
def test_a_head_is_found_under_the_names_that_peft_gives(prefix: str, name: str) -> None:
    found = {prefix + name: TensorInfo((3, 8), "F32")}
    head = find_head({"task_type": "TOKEN_CLS"}, found)
    assert head is not None
    assert (head.task, head.weight, head.bias, head.num_labels, head.hidden_size) == (
        "token_classify", prefix + name, None, 3, 8,
    )  # fmt: skip


def test_adapters_of_other_tasks_have_none() -> None:
    assert find_head({"task_type": "CAUSAL_LM"}, infos(score_weight=(3, 8))) is None
    assert read_classifier({}, b'{"response_format": {"type": "json_object"}}', {}) is None


@pytest.mark.parametrize(
    ("found", "error"),
    [
        ({}, AdapterMalformed),
        (infos(classifier_dense_weight=(3, 8)), AdapterMalformed),
        (infos(score_bias=(3,)), AdapterMalformed),
        (infos(score_weight=(3, 8), classifier_weight=(3, 8)), AdapterMalformed),
        (infos(score_weight=(3, 8), score_bias=(4,)), AdapterMalformed),
        (infos(score_weight=(8,)), AdapterMalformed),
        (infos(score_weight=(0, 8)), AdapterMalformed),
        (infos(score_weight=(MAX_LABELS + 1, 8)), AdapterTooLarge),
    ],
)
def test_a_head_that_cannot_be_served_is_refused(found: dict[str, TensorInfo], error: type[AdapterError]) -> None:
    with pytest.raises(error):
        find_head(SEQUENCE, found)


@pytest.mark.parametrize(
    ("problem", "num_labels", "activation"),
    [
        (None, 2, "softmax"),
        (None, 1, "sigmoid"),
        ("single_label_classification", 2, "softmax"),
        ("single_label_classification", 1, "sigmoid"),
        ("multi_label_classification", 2, "sigmoid"),
        ("regression", 1, "none"),
        ("regression", 2, "none"),
    ],
)
def test_the_activation_follows_the_problem_type(problem: str | None, num_labels: int, activation: str) -> None:
    defaults = json.dumps({"problem_type": problem}).encode()
    found = read_classifier(SEQUENCE, defaults, infos(score_weight=(num_labels, 8)))
    assert found is not None
    assert found.activation == activation
    assert found.labels == tuple(f"LABEL_{i}" for i in range(num_labels))


@pytest.mark.parametrize(
    "stated",
    [
        {"id2label": {"0": "a"}},
        {"id2label": {"0": "a", "2": "b"}},
        {"id2label": ["a", "b"]},
        {"id2label": {"0": "a", "1": 1}},
        {"id2label": {"0": "a", "1": "b" * 257}},
        {"problem_type": "other"},
        {"problem_type": ["regression"]},
        {"score_template": "{query} {document}"},
    ],
)
def test_statements_that_do_not_fit_the_head_are_refused(stated: dict[str, Any]) -> None:
    with pytest.raises(AdapterMalformed):
        read_classifier(SEQUENCE, json.dumps(stated).encode(), infos(score_weight=(2, 8)))


@pytest.mark.parametrize(
    "template",
    ["", "{query}", "{document} {query}", "{query} {document} {query}", 3, "{query}{document}" + "a" * 65_536],
)
def test_a_template_has_both_texts_once(template: object) -> None:
    stated = json.dumps({"score_template": template}).encode()
    with pytest.raises(AdapterMalformed):
        read_classifier(SEQUENCE, stated, infos(score_weight=(1, 8)))


def test_texts_that_look_like_places_of_a_template_stay_as_they_are() -> None:
    stated = json.dumps({"score_template": "a {query} b {document} c"}).encode()
    found = read_classifier(SEQUENCE, stated, infos(score_weight=(1, 8)))
    assert found is not None
    assert found.pair("{document}", "{query}") == "a {document} b {query} c"


def test_labels_without_a_head_are_refused() -> None:
    with pytest.raises(AdapterMalformed, match="id2label"):
        read_classifier({"task_type": "CAUSAL_LM"}, b'{"id2label": {"0": "a"}}', {})
