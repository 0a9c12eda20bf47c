"""Reads the classification head of an adapter that was trained with PEFT's task type SEQ_CLS or TOKEN_CLS.

The head is `score` or `classifier`, a linear that modules_to_save stores with the adapter. PEFT does not store the
names of its labels. lorafleet.json may have them as `id2label`, with `problem_type` as in transformers' config.json,
and a `score_template` that joins the two texts of a pair.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lorafleet.protocol.adapter_formats.adapter_rope import DEFAULTS_NAME
from lorafleet.protocol.adapter_formats.safetensors_header import TensorInfo
from lorafleet.protocol.errors import AdapterMalformed, AdapterTooLarge
from lorafleet.protocol.messages import HeadTask
from lorafleet.protocol.strict_json import read_json_object, shown

CLASSIFIER_KEYS = ("id2label", "problem_type", "score_template")
HEAD_TASKS: Mapping[str, HeadTask] = {"SEQ_CLS": "classify", "TOKEN_CLS": "token_classify"}  # by PEFT's task type
MAX_LABELS = 4096
MAX_LABEL_NAME_CHARS = 256
MAX_TEMPLATE_CHARS = 65_536  # of `score_template`
QUERY, DOCUMENT = "{query}", "{document}"

Activation = Literal["softmax", "sigmoid", "none"]
_ACTIVATIONS: Mapping[object, Activation] = {
    None: "softmax",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "none",
}
_HEAD = re.compile(
    r"(?:base_model\.model\.)*(?:score|classifier)\.(?:modules_to_save\.)?(?:default\.)?(?P<leaf>weight|bias)"
)


@dataclass(frozen=True, slots=True)
class HeadTensors:
    """The tensors of a head [num_labels, hidden_size] in the weights file."""

    task: HeadTask
    weight: str
    bias: str | None
    num_labels: int
    hidden_size: int

    @property
    def names(self) -> set[str]:
        return {self.weight} if self.bias is None else {self.weight, self.bias}


@dataclass(frozen=True, slots=True)
class AdapterClassifier:
    """The meaning of a head's outputs."""

    task: HeadTask
    labels: tuple[str, ...]  # The names of the outputs, in their order.
    activation: Activation  # Turns the outputs into probabilities, as in vLLM.
    # The texts before the query, between query and document, and after the document. None: the document follows the
    # query directly, as in vLLM.
    template: tuple[str, str, str] | None = None

    @property
    def num_chars(self) -> int:
        return sum(map(len, (*self.labels, *(self.template or ()))))

    def pair(self, query: str, document: str) -> str:
        """Returns the prompt for a pair of texts."""
        before, between, after = self.template or ("", "", "")
        return f"{before}{query}{between}{document}{after}"


def find_head(config: Mapping[str, object], infos: Mapping[str, TensorInfo]) -> HeadTensors | None:
    """Returns the head's tensors, or None if the adapter's task has no head.

    Raises AdapterMalformed if the head is missing or misshapen, and AdapterTooLarge if it has too many labels.

    Args:
        config: adapter_config.json.
        infos: the tensors of the weights file, by name.
    """
    task_type = config.get("task_type")
    task = HEAD_TASKS.get(task_type) if isinstance(task_type, str) else None
    if task is None:
        return None
    found: dict[str, str] = {}
    for name in infos:
        match = _HEAD.fullmatch(name)
        if match is None:
            continue
        other = found.setdefault(match["leaf"], name)
        if other != name:
            raise AdapterMalformed(f"{shown(other)} and {shown(name)} are both the {match['leaf']} of the head.")
    if "weight" not in found:
        raise AdapterMalformed(
            f"task_type is {task_type!r}, but the weights file has no head: PEFT saves it as base_model.model.score."
            "weight or base_model.model.classifier.weight. Heads of several layers are not supported."
        )
    shape = infos[found["weight"]].shape
    if len(shape) != 2 or 0 in shape:
        raise AdapterMalformed(
            f"the head {shown(found['weight'])} has shape {shown(list(shape))}; it must be a matrix."
        )
    if shape[0] > MAX_LABELS:
        raise AdapterTooLarge(f"the adapter's head has {shape[0]} labels; at most {MAX_LABELS} are supported.")
    bias = found.get("bias")
    if bias is not None and infos[bias].shape != shape[:1]:
        raise AdapterMalformed(
            f"the head's bias {shown(bias)} has shape {shown(list(infos[bias].shape))}; its weight requires "
            f"{[shape[0]]}."
        )
    return HeadTensors(task, found["weight"], bias, shape[0], shape[1])


def read_classifier(
    config: Mapping[str, object], defaults: bytes | None, infos: Mapping[str, TensorInfo]
) -> AdapterClassifier | None:
    """Returns what an adapter's files say of its head, or None if its task has none.

    Raises the errors of find_head(), and AdapterMalformed for what lorafleet.json says of the head.

    Args:
        config: adapter_config.json.
        defaults: lorafleet.json, or None if there is none.
        infos: the tensors of the weights file, by name.
    """
    given = {} if defaults is None else read_json_object(defaults, DEFAULTS_NAME)
    stated = {key: given[key] for key in CLASSIFIER_KEYS if given.get(key) is not None}
    head = find_head(config, infos)
    if head is None:
        if stated:
            raise AdapterMalformed(
                f"{DEFAULTS_NAME} has {min(stated)}, but the adapter has no classification head: its task_type is not "
                f"{' or '.join(HEAD_TASKS)}."
            )
        return None
    problem = stated.get("problem_type")
    if problem is not None and (not isinstance(problem, str) or problem not in _ACTIVATIONS):
        known = ", ".join(str(name) for name in _ACTIVATIONS if name is not None)
        raise AdapterMalformed(f"{DEFAULTS_NAME} has the problem_type {shown(problem)}; it must be one of {known}.")
    activation = _ACTIVATIONS[problem]
    if activation == "softmax" and head.num_labels == 1:
        activation = "sigmoid"  # the softmax of one number is 1
    return AdapterClassifier(
        head.task,
        _labels(stated.get("id2label"), head.num_labels),
        activation,
        _template(stated.get("score_template"), head),
    )


def _labels(given: object, count: int) -> tuple[str, ...]:
    if given is None:
        return tuple(f"LABEL_{i}" for i in range(count))
    if not isinstance(given, dict) or given.keys() != set(map(str, range(count))):
        raise AdapterMalformed(
            f"{DEFAULTS_NAME} has the id2label {shown(given)}; the head has {count} labels, so it must be an object "
            f'with the keys "0" to "{count - 1}".'
        )
    labels = tuple(given[str(i)] for i in range(count))
    for label in labels:
        if not isinstance(label, str) or len(label) > MAX_LABEL_NAME_CHARS:
            raise AdapterMalformed(
                f"{DEFAULTS_NAME} has the label {shown(label)}; a label must be a text of at most "
                f"{MAX_LABEL_NAME_CHARS} characters."
            )
    return labels


def _template(given: object, head: HeadTensors) -> tuple[str, str, str] | None:
    if given is None:
        return None
    if head.task != "classify" or head.num_labels != 1:
        raise AdapterMalformed(
            f"{DEFAULTS_NAME} has a score_template, but only adapters with task_type SEQ_CLS and one label score pairs "
            "of texts."
        )
    if not isinstance(given, str) or len(given) > MAX_TEMPLATE_CHARS:
        raise AdapterMalformed(
            f"{DEFAULTS_NAME} has the score_template {shown(given)}; it must be a text of at most {MAX_TEMPLATE_CHARS} "
            "characters."
        )
    before, found, rest = given.partition(QUERY)
    between, also_found, after = rest.partition(DOCUMENT)
    if not (found and also_found) or given.count(QUERY) + given.count(DOCUMENT) != 2:
        raise AdapterMalformed(
            f"{DEFAULTS_NAME} has the score_template {shown(given)}; it must contain {QUERY} once, and after it "
            f"{DOCUMENT} once."
        )
    return before, between, after
