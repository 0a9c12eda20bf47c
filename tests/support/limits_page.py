"""Writes docs/limits.md from the constants that enforce the limits, and request fields from the OpenAPI document.

python tests/support/limits_page.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lorafleet.api import languages
from lorafleet.api.access import audit
from lorafleet.api.access import caller_admission as request_admission
from lorafleet.api.access.fair_threads import LONG_WORK
from lorafleet.api.request import prompts
from lorafleet.api.routes import response_storing
from lorafleet.api.routes.build_api import ROUTES
from lorafleet.api.routes.openapi import openapi
from lorafleet.api.stored import response_store
from lorafleet.api.telemetry import recent, traffic_history
from lorafleet.api.text import (
    adapter_language,
    language_cache,
    special_tokens,
    templates,
    tokenizer_document,
    tokenizers,
    tokenizing,
)
from lorafleet.cluster.admin import download_api, removals, replica_orders, upload_tensors
from lorafleet.cluster.admin.admin_api import admin_routes
from lorafleet.cluster.admin.downloading import DOWNLOADS
from lorafleet.cluster.admin.pushing import PUSHES
from lorafleet.cluster.admin.trainer_api import trainer_routes
from lorafleet.cluster.admin.upload_tar import MAX_TAR_HEADERS, MAX_UPLOAD_BYTES
from lorafleet.cluster.admin.verification import VERIFICATIONS
from lorafleet.cluster.batches import batch_bounds
from lorafleet.cluster.batches.batch_routes import batch_routes
from lorafleet.cluster.catalogue import catalogue, catalogue_records
from lorafleet.cluster.config import AppArgs
from lorafleet.cluster.console import directory_view, state_api
from lorafleet.cluster.directory import adapter_names, directory_socket, membership, name_copies
from lorafleet.cluster.directory.directory_timing import TIMING
from lorafleet.cluster.proxy import haproxy_answers, haproxy_config, haproxy_sessions
from lorafleet.cluster.receiving import device_readers, update_groups
from lorafleet.cluster.serve import adapter_lookup, residency_metrics, serve_environment
from lorafleet.cluster.tenancy import audit_log, key_file, usage_log
from lorafleet.offline.batch import batch_input
from lorafleet.protocol import limits, names
from lorafleet.protocol import lora_config as lora_config
from lorafleet.protocol import sources as resolver_config
from lorafleet.protocol.adapter_formats import (
    adapter_classifier,
    adapter_files,
    safetensors_header,
    tensor_push,
    torch_archive,
    torch_index,
)
from lorafleet.protocol.kv_events_config import KVEventsConfig
from lorafleet.protocol.limits import Range
from lorafleet.protocol.transport import engine_socket
from lorafleet.resolvers import deadline, neighbor_fetch, neighbor_server, ranges, store
from lorafleet.sandbox import shunned
from lorafleet.workers.adapters import patterns, peft_helper, peft_names
from lorafleet.workers.adapters.kinds import vocabulary
from lorafleet.workers.kv_events import event_publisher
from lorafleet.workers.schedule import admission, fair_queue
from lorafleet.workers.structured import grammar_process, grammar_program, vocabularies

PAGE = Path(__file__).parents[2] / "docs" / "limits.md"
INTRODUCTION = """# Limits

Every input from outside has a bound on its size and on the work that it causes. A request that exceeds a bound is
rejected with an error in OpenAI's or Anthropic's form, which names the field, the value or size, and the bound. No
other request fails. Some bounds are changed by an option, which the table names. All others are constants.

`tests/support/limits_page.py` writes this page from the code, and a test fails if they differ. For programs,
`/openapi.json` has the bounds of all fields; a test fails if one is missing there.
"""

REFUSED = "400, names the field"
MALFORMED = "400 `adapter_malformed` when the adapter is pushed or loaded"
TOO_LARGE = "400 `adapter_too_large` when the adapter is pushed or loaded"
BUSY = "429 `queue_full`, with Retry-After"
RATE = "429 `rate_limit_exceeded`"
FAILED = "the batch ends as `failed`"
INTERNAL = "no error: older entries are evicted, or work waits"


class Limit(NamedTuple):
    name: str
    bound: object
    changed_by: str  # An empty string means that nobody can change the limit.
    answer: str


def size(num_bytes: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 1 << shift and num_bytes % (1 << shift) == 0:
            return f"{num_bytes >> shift} {unit}"
    return f"{num_bytes:,} bytes"


def chars(count: int) -> str:
    return f"{count:,} characters"


def seconds(count: float) -> str:
    return f"{count:g} s"


def default(option: str) -> object:
    value = AppArgs.model_fields[option].default
    return "none" if value is None else f"{value:,}" if isinstance(value, int) else value


def flag(option: str) -> str:
    assert option in AppArgs.model_fields, option
    return f"`--{option.replace('_', '-')}`"


BODY = [
    Limit("request line and headers together", size(haproxy_answers.MAX_HEADER_BYTES), "", "431"),
    Limit("time to send the headers", seconds(haproxy_config.HEADERS_S), "", "408, connection closed"),
    Limit("time until the body begins", seconds(haproxy_config.BODY_S), "", "408, connection closed"),
    Limit("client that makes no progress", seconds(haproxy_config.CLIENT_S), "", "connection closed"),
    Limit(
        "part of a body that HAProxy buffers before a replica has checked the key; nothing if no key is sent",
        size(serve_environment.ROUTED_BODY_BYTES),
        "",
        "the rest is read once the key is accepted",
    ),
    Limit(
        "silence of a replica that was marked down, after which calls that cannot be repeated are ended",
        seconds(haproxy_sessions.GIVE_UP_S),
        "",
        "503 `outcome_unknown`",
    ),
    Limit("time to send the whole body", seconds(limits.MAX_BODY_READ_S), "", "408 `body_timeout`"),
    Limit("body", size(limits.MAX_BODY_BYTES), flag("max_body_bytes"), "413 `body_too_large`"),
    Limit(
        "bodies of all requests in flight on a replica",
        f"{size(limits.MAX_BODIES_BYTES)}, half of it for one tenant",
        f"{flag('max_body_bytes')}: at least two bodies of that size",
        "one tenant's: 429 `queue_full`; of all: 503 `overloaded`; with Retry-After",
    ),
    Limit(
        "stored responses of a replica",
        f"{size(limits.RESPONSE_STORE_BYTES)}, {response_store.MAX_STORED_RESPONSES:,} responses, "
        f"{seconds(response_store.MAX_STORED_S)}",
        flag("response_store_bytes"),
        "the oldest response of the tenant that has most is dropped",
    ),
    Limit("responses of one tenant in the background, on a replica", response_storing.MAX_BACKGROUND, "", BUSY),
    Limit("connections of one address", haproxy_config.CONNECTIONS_PER_CLIENT, "", "connection closed"),
    Limit("commas in a body, texts included", limits.MAX_BODY_COMMAS, "", "413 `body_too_large`"),
    Limit(
        "opening brackets and braces in a body, texts included", limits.MAX_BODY_BRACKETS, "", "413 `body_too_large`"
    ),
    Limit("colons in a body, texts included", limits.MAX_BODY_COLONS, "", "413 `body_too_large`"),
    Limit("content type of a body", "application/json", "", "415 `unsupported_media_type`"),
    Limit("fields of an object", limits.MAX_OBJECT_FIELDS, "", REFUSED),
    Limit("numbers in JSON", limits.JSON_NUMBER, "", "400"),
    Limit("`X-Request-Id`", f"{chars(limits.MAX_REQUEST_ID_CHARS)}, printable", "", REFUSED),
    Limit("`X-Queue-Timeout-Seconds`", limits.QUEUE_TIMEOUT_S, "", REFUSED),
    Limit("`Origin`, `Host` without keys", "the server's own", flag("allowed_origins"), "403 `forbidden`"),
    Limit("name in the path", chars(limits.MAX_MODEL_CHARS), "", REFUSED),
    Limit("part of a client's value that an error message repeats", chars(limits.MAX_SHOWN_CHARS), "", "cut"),
]
ACROSS = [
    Limit("prompts x n", limits.MAX_SAMPLES, "", REFUSED),
    Limit("tokens of all prompts, each n times", limits.MAX_PROMPT_TOKENS, "", REFUSED),
    Limit("texts of all pairs of `/score` and `/rerank` with a head", chars(limits.MAX_PAIR_CHARS), "", REFUSED),
    Limit("numbers that a classification head computes", limits.MAX_HEAD_VALUES, "", REFUSED),
    Limit("ids of `allowed_token_ids` and `bad_words`, for each prompt x n", limits.MAX_LISTED_IDS, "", REFUSED),
    Limit(
        "prompt and answer",
        "the model's context (an adapter may have its own), or the KV cache",
        flag("max_model_len"),
        "400 `context_length_exceeded`",
    ),
    Limit(
        "text to be tokenized",
        f"{prompts.MAX_CHARS_PER_TOKEN} characters a token of the context, at least {limits.MAX_TOKENIZE_CHARS:,}",
        "",
        "400 `context_length_exceeded`",
    ),
    Limit("parts and calls of all messages", limits.MAX_PARTS, "", REFUSED),
    Limit("schema, regex, grammar, choices together", size(limits.MAX_SOURCE_BYTES), "", REFUSED),
    Limit("grammars in Lark of all custom tools", size(limits.MAX_LARK_BYTES), "", REFUSED),
    Limit(
        "values in a schema, `chat_template_kwargs` or a field without effect",
        f"{limits.MAX_JSON_VALUES:,}, {limits.MAX_JSON_DEPTH} levels",
        "",
        REFUSED,
    ),
    Limit("adapters in a mix", limits.MAX_MIXED, "", REFUSED),
]
QUEUES = [
    Limit(
        "requests that a replica accepts at a time",
        default("max_ongoing_requests"),
        flag("max_ongoing_requests"),
        "further ones wait at the replica",
    ),
    Limit("requests that wait for their first step", default("max_queued_requests"), flag("max_queued_requests"), BUSY),
    Limit("prompt tokens that wait", default("max_queued_tokens"), flag("max_queued_tokens"), BUSY),
    Limit(
        "time to wait for the first step",
        default("queue_timeout"),
        f"{flag('queue_timeout')}, or the header",
        "429 `queue_timeout`",
    ),
    Limit(
        "time of a stopped replica for its answers",
        seconds(AppArgs.model_fields["drain_timeout"].default),
        flag("drain_timeout"),
        "answers are cut off",
    ),
    Limit("`Retry-After`", seconds(admission.MAX_RETRY_S), "", ""),
    Limit("sequences in a step", default("max_num_seqs"), flag("max_num_seqs"), "further ones wait"),
    Limit("tokens in a step", default("max_num_batched_tokens"), flag("max_num_batched_tokens"), "further ones wait"),
    Limit("idle flows (a tenant's requests for one adapter) that are kept", fair_queue.MAX_IDLE_FLOWS, "", INTERNAL),
    Limit(
        "long bodies, conversations and answers read or written at a time", LONG_WORK.running, "", "further ones wait"
    ),
    Limit("long bodies, conversations and answers of one tenant that wait", LONG_WORK.waiting, "", BUSY),
    Limit(
        "requests of one tenant to each of `/tokenize`, `/detokenize`, `/v1/responses/input_tokens`, `/metrics` and "
        "the console's state, at a time",
        request_admission.MAX_AUXILIARY,
        "",
        BUSY,
    ),
    Limit("long texts of the base's tokenizer at a time", tokenizing.MAX_LONG_TEXTS, "", "further ones wait"),
    Limit("texts of adapters' tokenizers at a time", tokenizing.MAX_ADAPTER_TEXTS, "", "further ones wait"),
    Limit("texts of one tenant that wait", tokenizing.MAX_TEXTS_WAITING, "", BUSY),
    Limit("templates of one tenant that wait", templates.MAX_TEMPLATES_WAITING, "", BUSY),
    Limit("grammars of one tenant that wait", grammar_process.MAX_GRAMMARS_WAITING, "", BUSY),
    Limit(
        "tokenizers and templates of one tenant's adapters that wait to be read",
        languages.MAX_LANGUAGES_WAITING,
        "",
        BUSY,
    ),
    Limit(
        "wait for an answer about quotas",
        seconds(TIMING.admit_s),
        "",
        "the replica admits its own share of the limits; 503 if it does not know how many replicas share them",
    ),
    Limit("wait for the directory", seconds(TIMING.patience_s), "", "503, with Retry-After"),
    Limit(
        "requests and tokens a minute, requests at a time",
        "none",
        "`limits` of a key or tenant",
        "429 `rate_limit_exceeded`",
    ),
    Limit(
        "batches of KV events that wait to be published",
        KVEventsConfig().max_queue_size,
        "`max_queue_size` of `--kv-events-config`",
        "the batch is dropped, and its number is missing",
    ),
    Limit(
        "batches of KV events that wait for one slow subscriber",
        KVEventsConfig().hwm,
        "`hwm` of `--kv-events-config`",
        "the subscriber misses those beyond",
    ),
    Limit(
        "batches of KV events that can be asked for again",
        f"{KVEventsConfig().buffer_steps:,}, {size(event_publisher.MAX_REPLAY_BYTES)}",
        "`buffer_steps` of `--kv-events-config`",
        "older ones are gone",
    ),
    Limit(
        "adapters in host memory that `--metrics-lora-info` names",
        residency_metrics.MAX_SHOWN,
        "",
        "the others are only counted",
    ),
    Limit("failures that the console remembers", recent.MAX_FAILURES, "", INTERNAL),
    Limit("adapters counted by name in a window", recent.MAX_NAMES, "", INTERNAL),
    Limit(
        f"tenants and adapters counted separately in {traffic_history.BUCKET_S} s of the console's charts",
        f"{traffic_history.MAX_TENANTS}, {traffic_history.MAX_NAMES}",
        "",
        "others are in the totals alone; an adapter with more requests takes the place of a rarer one",
    ),
]
_SANDBOX = templates.TemplateLimits()
_READ, _ENCODE = tokenizers.TokenizerLimits().read, tokenizers.TokenizerLimits().encode
_GRAMMAR = grammar_process.GrammarLimits()
PROCESSES = [
    Limit("template: CPU time, memory", f"{seconds(_SANDBOX.cpu_s)}, {size(_SANDBOX.memory_bytes)}", "", REFUSED),
    Limit("template: characters of its output", chars(_SANDBOX.output_chars), "", REFUSED),
    Limit("templates rendered at a time", templates.MAX_TEMPLATES_RENDERED, "", "further ones wait"),
    Limit(
        "tokenizer, read: CPU time, memory",
        f"{seconds(_READ.cpu_s)}, {size(_READ.memory_bytes)}",
        "",
        MALFORMED,
    ),
    Limit("tokenizer, its tables: memory", size(tokenizers.TokenizerLimits().tables_bytes), "", MALFORMED),
    Limit(
        "tokenizer, a text: CPU time, memory",
        f"{seconds(_ENCODE.cpu_s)}, {size(_ENCODE.memory_bytes)}",
        "",
        REFUSED,
    ),
    Limit("processes of adapters' tokenizers", tokenizers.MAX_ENCODERS, "", "the least recently used one ends"),
    Limit(
        "tokenizers of adapters in memory", language_cache.MAX_TOKENIZERS, "", "the least recently used one is evicted"
    ),
    Limit(
        "languages of adapters in memory",
        f"{language_cache.MAX_LANGUAGES:,}, {size(language_cache.MAX_LANGUAGE_BYTES)}",
        "",
        "the least recently used one is evicted",
    ),
    Limit(
        "grammar, first compiled: CPU time, memory",
        f"{seconds(_GRAMMAR.trial_cpu_s)}, {size(_GRAMMAR.trial_memory_bytes)}",
        "",
        REFUSED,
    ),
    Limit("grammar, first compiled: time in all", seconds(_GRAMMAR.trial_s), "", "429 `queue_full`, with Retry-After"),
    Limit("grammars first compiled at a time", grammar_process.MAX_TRIALS, "", "further ones wait"),
    Limit("process of compiled grammars: memory", size(_GRAMMAR.memory_bytes), "", "503, and it is restarted"),
    Limit(
        "processes of grammars, one for each vocabulary of adapters; the base's comes besides",
        f"{vocabularies.MAX_VOCABULARIES}, of which one tenant uses {vocabularies.MAX_VOCABULARIES_OF_ONE}",
        "",
        "the least recently used one ends; 503 where all are in use",
    ),
    Limit("wait of a step for masks of grammars", seconds(_GRAMMAR.step_wait_s), "", "the sequence samples later"),
    Limit("masks of one step", seconds(_GRAMMAR.mask_s), "", "503, and the process is restarted"),
    Limit(
        "process that compiles grammars and does not answer a ping",
        seconds(_GRAMMAR.ping_s),
        "",
        "503, and the process is restarted",
    ),
    Limit("grammars that a process leaves unread", size(grammar_process.MAX_UNSENT_BYTES), "", "503"),
    Limit("compiled grammars in memory", grammar_program.MAX_GRAMMARS, "", INTERNAL),
    Limit(
        "time for which a job that had to be ended is rejected without another try",
        seconds(shunned.SHUN_S),
        "",
        REFUSED,
    ),
    Limit(
        "worker that leaves a message unacknowledged",
        seconds(engine_socket.UNACKNOWLEDGED_S),
        "",
        "503, and the replica is replaced",
    ),
]
ADAPTERS = [
    Limit("name", chars(names.MAX_NAME_CHARS), "", "400 `invalid_adapter_name`"),
    Limit("`adapter_config.json`", size(adapter_files.MAX_CONFIG_BYTES), "", MALFORMED),
    Limit("`adapter_model.safetensors`", size(adapter_files.MAX_WEIGHTS_BYTES), "", MALFORMED),
    Limit("`adapter_model.bin`", size(adapter_files.MAX_BIN_BYTES), "", MALFORMED),
    *(Limit(f"`{name}`", size(most), "", MALFORMED) for name, most in adapter_files.OPTIONAL_NAMES.items()),
    Limit("upload", f"{MAX_UPLOAD_BYTES:,} bytes", "", "413 `body_too_large`"),
    Limit("push of tensors", size(tensor_push.MAX_PUSH_BYTES), "", "413 `body_too_large`"),
    Limit("time to receive a push of tensors", seconds(upload_tensors.MAX_READ_S), "", "408 `body_timeout`"),
    Limit("pushes of tensors in memory", size(2 * tensor_push.MAX_PUSH_BYTES), "", "429 `queue_full` or 503"),
    Limit("process groups of trainers at a replica", update_groups.MAX_GROUPS, "", "429 `queue_full`"),
    Limit("time to copy a push out of a GPU", seconds(device_readers.COPY_S), "", "400"),
    Limit("entries of an upload's tar", MAX_TAR_HEADERS, "", "400 `adapter_malformed`"),
    Limit("labels of a classification head", adapter_classifier.MAX_LABELS, "", TOO_LARGE),
    Limit("label in `id2label`", chars(adapter_classifier.MAX_LABEL_NAME_CHARS), "", MALFORMED),
    Limit("`score_template`", chars(adapter_classifier.MAX_TEMPLATE_CHARS), "", MALFORMED),
    Limit("tensors", safetensors_header.MAX_TENSORS, "", MALFORMED),
    Limit("header of a safetensors file", size(safetensors_header.MAX_HEADER_BYTES), "", MALFORMED),
    Limit(
        "pickle of a .bin", f"{size(torch_archive.MAX_PICKLE_BYTES)}, {torch_index.MAX_STEPS:,} steps", "", MALFORMED
    ),
    Limit("name of a tensor", chars(peft_names.MAX_NAME_CHARS), "", MALFORMED),
    Limit("entries of a list or pattern table", peft_helper.MAX_ENTRIES, "", MALFORMED),
    Limit("`modules_to_save`", peft_helper.MAX_SAVED, "", MALFORMED),
    Limit(
        "pattern",
        f"{chars(patterns.MAX_PATTERN_CHARS)}; all of an adapter {seconds(patterns.TOTAL_MATCH_S)}",
        "",
        MALFORMED,
    ),
    Limit(
        "rank",
        default("max_lora_rank"),
        f"{flag('max_lora_rank')}, up to {lora_config.MAX_RANK_BOUND:,}",
        "400 `rank_too_large`",
    ),
    Limit(
        "adapters in use at the same time",
        default("max_loras"),
        f"{flag('max_loras')}, up to {lora_config.MAX_LORAS_BOUND:,}",
        "their requests take turns",
    ),
    Limit(
        "adapters in slots",
        lora_config.LoRAConfig().gpu_loras,
        f"{flag('max_gpu_loras')}, up to {lora_config.MAX_LORAS_BOUND:,}",
        "others leave for them",
    ),
    Limit(
        "A and B of adapters in slots",
        f"{default('max_loras')} adapters of rank {default('max_lora_rank')}",
        flag("lora_memory_gib"),
        "others leave for them; 400 `adapter_too_large` for an adapter that is larger than all of it",
    ),
    Limit(
        "rows that a table of the vocabulary adds",
        vocabulary.MAX_ADDED_TOKENS,
        flag("lora_extra_vocab_size"),
        TOO_LARGE,
    ),
    Limit("tokens that an adapter's tokenizer adds to the base's", adapter_language.MAX_NEW_TOKENS, "", MALFORMED),
    Limit("end-of-sequence token ids", adapter_language.MAX_EOS_TOKEN_IDS, "", MALFORMED),
    Limit("tokenizers and templates read at a time", languages.MAX_LANGUAGES_READ, "", "further ones wait"),
    Limit("special tokens in a file", special_tokens.MAX_SPECIAL_TOKENS, "", MALFORMED),
    Limit("added tokens of a tokenizer", tokenizer_document.MAX_ADDED_TOKENS, "", MALFORMED),
    Limit("merges of a tokenizer", tokenizer_document.MAX_MERGES, "", MALFORMED),
    Limit("token of a tokenizer", chars(tokenizer_document.MAX_TOKEN_CHARS), "", MALFORMED),
    Limit(
        "adapter that a resolver fetches",
        f"{size(resolver_config.MAX_BYTES)}, {seconds(resolver_config.TIMEOUT_S)}",
        "`max_bytes`, `timeout_s` of its resolver",
        "400 `adapter_too_large`, 503 `adapter_unavailable`",
    ),
    Limit(
        "names that resolvers look for at a time, on a replica",
        adapter_lookup.SEARCHES.running,
        "",
        "further ones wait",
    ),
    Limit("names of one tenant that wait to be looked for", adapter_lookup.SEARCHES.waiting, "", BUSY),
    Limit("concurrent fetches of adapters in one process", store.FETCH_THREADS, "", "further ones wait"),
    Limit("other nodes that are asked for an adapter", neighbor_fetch.LIMITS.most_tried, "", "its source is asked"),
    Limit(
        "time of another node to offer an adapter, and its least rate",
        f"{seconds(neighbor_fetch.LIMITS.offer_s)}, {neighbor_fetch.LIMITS.least_bytes_s / 1e6:.0f} MB/s",
        "",
        "the next node or the source is asked",
    ),
    Limit("adapters that a replica sends to other nodes at a time", neighbor_server.SENDS, "", "others are asked"),
    Limit("redirects of a source", ranges.MAX_REDIRECTS, "", "503 `adapter_unavailable`"),
    Limit("silence of a source", seconds(deadline.SOCKET_S), "", "retried, then 503 `adapter_unavailable`"),
    Limit(
        "cache of fetched adapters",
        size(resolver_config.CACHE_BYTES),
        flag("lora_cache_bytes"),
        "the least recently used adapter is evicted",
    ),
    Limit(
        "versions of an adapter", removals.MAX_VERSIONS, "", "the oldest version that no alias stands for is dropped"
    ),
    Limit("aliases of an adapter, its own name among them", catalogue_records.MAX_ALIASES, "", "400, names the field"),
    Limit(
        "record of an adapter: versions with their metadata, aliases with their moves",
        size(catalogue.MAX_ENTRY_BYTES),
        "",
        "400, names the field",
    ),
    Limit("moves that an alias remembers", catalogue_records.MAX_HISTORY, "", "the oldest is dropped"),
    Limit(
        "adapters, bytes of a tenant", "none", "`adapters`, `adapter_bytes` of the tenant", "429 `rate_limit_exceeded`"
    ),
]
SERVER = [
    Limit("adapters on a page of `/v1/adapters`", limits.MAX_ADAPTERS_LISTED, "", REFUSED),
    Limit("adapters on a page of the console", state_api.MAX_ADAPTERS, "", REFUSED),
    Limit("search text of the console", chars(state_api.MAX_SEARCH_CHARS), "", REFUSED),
    Limit("concurrent searches of the console", directory_view.SEARCHES.running, "", "further ones wait"),
    Limit("waiting console searches of one tenant", directory_view.SEARCHES.waiting, "", BUSY),
    Limit("uploads of one tenant at a time", request_admission.MAX_UPLOADS, "", BUSY),
    Limit("downloads of one tenant at a time", download_api.MAX_DOWNLOADS, "", BUSY),
    Limit("downloads that a replica fetches or checks at a time", DOWNLOADS.running, "", "further ones wait"),
    Limit("downloads of one tenant that wait", DOWNLOADS.waiting, "", BUSY),
    Limit("pushes that a replica copies at a time", PUSHES.running, "", "further ones wait"),
    Limit("pushes of one tenant that wait", PUSHES.waiting, "", BUSY),
    Limit("versions that are verified at a time", VERIFICATIONS.running, "", "further ones wait"),
    Limit("verifications of one tenant that wait", VERIFICATIONS.waiting, "", BUSY),
    Limit("load of an adapter on a replica", seconds(replica_orders.ORDER_S), "", "503 `overloaded`"),
    Limit("administrative call that changes something", seconds(membership.CHANGE_S), "", "503, with Retry-After"),
    Limit("names that resolvers have found, remembered by the directory", adapter_names.MAX_FOUND, "", INTERNAL),
    Limit("names of which a replica has copies", name_copies.MAX_COPIES, "", INTERNAL),
    Limit("each text in a line of the audit log", chars(audit.MAX_TEXT_CHARS), "", "cut"),
    Limit(
        "connection to the directory that has not shown the secret",
        f"{size(directory_socket.MAX_HELLO_BYTES)}, {directory_socket.MAX_STRANGERS:,} connections",
        "",
        "connection closed",
    ),
    Limit("message to the directory", size(directory_socket.MAX_CALL_BYTES), "", "connection closed"),
    Limit("answer of the directory", size(directory_socket.MAX_ANSWER_BYTES), "", "connection closed"),
    Limit(
        "file of keys",
        f"{size(key_file.MAX_FILE_BYTES)}, {key_file.MAX_KEYS:,} keys, {key_file.MAX_TENANTS:,} tenants",
        "",
        "rejected; the previous file stays active",
    ),
    Limit(
        "prefixes, and sources, of a tenant",
        f"{key_file.MAX_PLACES:,} of {chars(key_file.MAX_PLACE_CHARS)}",
        "",
        "rejected; the previous file stays active",
    ),
    Limit(
        "rejected calls in the audit log, per key and minute",
        audit_log.MAX_REFUSALS_PER_MINUTE,
        "",
        "further ones are only counted in `lorafleet_audit_unlogged`",
    ),
    Limit("usage records that cannot be written yet", size(usage_log.MAX_UNWRITTEN_BYTES), "", "503 `store_error`"),
]
BATCHES = [
    Limit("uploaded file", size(batch_bounds.MAX_FILE_BYTES), "", "413 `body_too_large`, or 400"),
    Limit(
        "other fields of an upload", f"{batch_bounds.MAX_FIELDS}, {size(batch_bounds.MAX_FORM_BYTES)} each", "", "400"
    ),
    Limit("time to upload a file", seconds(batch_bounds.MAX_UPLOAD_S), "", "408 `body_timeout`"),
    Limit("filename", chars(batch_bounds.MAX_FILENAME_CHARS), "", REFUSED),
    Limit("uploads, and downloads, of one tenant at a time, on a replica", request_admission.MAX_UPLOADS, "", BUSY),
    Limit(
        "other requests of one tenant to each route of files and batches, at a time",
        request_admission.MAX_AUXILIARY,
        "",
        BUSY,
    ),
    Limit(
        "bytes of all files",
        f"{size(limits.BATCH_STORE_BYTES)}, half of it for one tenant; outputs are counted, and written even beyond",
        flag("batch_store_bytes"),
        RATE,
    ),
    Limit("files of one tenant", batch_bounds.MAX_FILES_OF_ONE, "", RATE),
    Limit("life of a file", f"{seconds(batch_bounds.DEFAULT_LIVES_S)}, or `expires_after`", "", "404 `file_not_found`"),
    Limit("lines of a batch", batch_bounds.MAX_LINES, "", FAILED),
    Limit("line", f"{batch_input.MAX_LINE_BYTES:,} bytes", "", FAILED),
    Limit("faults that a batch lists", batch_bounds.MAX_ERRORS, "", "further ones are not shown"),
    Limit("answer of a line", size(batch_bounds.MAX_ANSWER_BYTES), "", "the line's error is `answer_too_large`"),
    Limit("answers of a batch", size(batch_bounds.MAX_OUTPUT_BYTES), "", FAILED),
    Limit(
        "lines of all batches in flight, in the cluster",
        default("batch_concurrency"),
        flag("batch_concurrency"),
        "further ones wait",
    ),
    Limit(
        "batches that run at a time, in the cluster",
        f"{batch_bounds.MAX_RUNNING}, of which one tenant has {batch_bounds.MAX_RUNNING_OF_ONE}",
        "",
        "further ones wait",
    ),
    Limit("batches of one tenant that have not ended", batch_bounds.MAX_OPEN_OF_ONE, "", RATE),
    Limit("batches of one tenant", batch_bounds.MAX_BATCHES_OF_ONE, "", "the oldest one that has ended is deleted"),
    Limit("time for which a batch that has ended is shown", seconds(batch_bounds.BATCH_LIVES_S), "", "404"),
    Limit("completion window", seconds(batch_bounds.WINDOW_S), "", "the batch ends as `expired`"),
]
SECTIONS = [
    ("Headers and bodies", BODY),
    ("Several fields together", ACROSS),
    ("Queues and times", QUEUES),
    ("Files and batches", BATCHES),
    ("Helper processes", PROCESSES),
    ("Adapters and their files", ADAPTERS),
    ("Administration, directory, keys and logs", SERVER),
]


def bounds_of(schema: dict[str, Any], definitions: dict[str, Any]) -> list[str]:
    """Returns the bounds of a field and of its items, in words."""
    if "$ref" in schema:
        return []
    if "enum" in schema:
        return [f"one of {len(schema['enum'])} values"]
    found: list[str] = []
    for inner in schema.get("anyOf", schema.get("oneOf", ())):
        found += bounds_of(inner, definitions)
    if "maxLength" in schema:
        found.append(chars(schema["maxLength"]))
    if "maximum" in schema:
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        found.append(str(Range(low, schema["maximum"], "exclusiveMinimum" in schema)))
    if "maxItems" in schema:
        inside = [bound for bound in bounds_of(schema.get("items", {}), definitions) if bound]
        found.append(f"{schema['maxItems']:,} entries" + (f" of {' or '.join(inside)}" if inside else ""))
    if "maxProperties" in schema:
        found.append(f"{schema['maxProperties']:,} entries")
    return list(dict.fromkeys(found))


def fields() -> Iterator[tuple[str, str, list[str]]]:
    """Yields each route's body, field and bounds. Booleans and fields without effect need no bounds."""
    routes = [*ROUTES, *admin_routes(None), *trainer_routes(None), *batch_routes()]  # type: ignore[arg-type]  # The routes are only described here.
    document = openapi(routes)
    definitions = document["components"]["schemas"]
    for path, methods in document["paths"].items():
        for operation in methods.values():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json")
            properties = definitions[content["schema"]["$ref"].rpartition("/")[2]]["properties"] if content else {}
            for name, schema in properties.items():
                if (bounds := bounds_of(schema, definitions)) and "enum" not in schema:
                    yield path, name, bounds
            for parameter in operation["parameters"]:
                if parameter["in"] == "query" and (bounds := bounds_of(parameter["schema"], definitions)):
                    yield path, f"?{parameter['name']}=", bounds


def field_rows() -> list[str]:
    """Returns one row for each field and bound, with the routes that have it."""
    rows: dict[tuple[str, str], list[str]] = {}
    for path, name, bounds in fields():
        rows.setdefault((name, "; ".join(bounds)), []).append(f"`{path}`")
    return [f"| `{name}` | {bound} | {', '.join(paths)} |" for (name, bound), paths in sorted(rows.items())]


def write() -> str:
    parts = [INTRODUCTION]
    for title, rows in SECTIONS:
        parts.append(f"\n## {title}\n\n| what | bound | changed by | if exceeded |\n|---|---|---|---|\n")
        for name, bound, changed_by, answer in rows:
            shown = f"{bound:,}" if isinstance(bound, int) else str(bound)
            parts.append(f"| {name} | {shown} | {changed_by or 'constant'} | {answer} |\n")
    parts.append(
        "\n## Fields of requests\n\nThese bounds are constants. A value beyond one gets a 400 that names the field.\n"
    )
    parts.append("\n| field | bound | routes |\n|---|---|---|\n" + "\n".join(field_rows()) + "\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(write())
