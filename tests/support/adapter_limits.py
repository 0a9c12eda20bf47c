"""Lists the limits of adapters, of the helper processes that read their files, and of administration."""

from __future__ import annotations

from limit_rows import BUSY, INTERNAL, MALFORMED, REFUSED, TOO_LARGE, Limit, chars, default, flag, seconds, size
from lorafleet.api import languages
from lorafleet.api.access import audit
from lorafleet.api.access import caller_admission as request_admission
from lorafleet.api.text import (
    adapter_language,
    language_cache,
    special_tokens,
    templates,
    tokenizer_document,
    tokenizers,
)
from lorafleet.cluster.admin import download_api, removals, replica_orders, upload_tensors
from lorafleet.cluster.admin.downloading import DOWNLOADS
from lorafleet.cluster.admin.pushing import PUSHES
from lorafleet.cluster.admin.upload_tar import MAX_TAR_HEADERS, MAX_UPLOAD_BYTES
from lorafleet.cluster.admin.verification import VERIFICATIONS
from lorafleet.cluster.catalogue import catalogue, catalogue_records
from lorafleet.cluster.console import directory_view, state_api
from lorafleet.cluster.directory import adapter_names, directory_socket, membership, name_copies
from lorafleet.cluster.receiving import device_readers, update_groups
from lorafleet.cluster.serve import adapter_lookup
from lorafleet.cluster.tenancy import audit_log, key_file, usage_log
from lorafleet.protocol import limits, lora_config, names
from lorafleet.protocol import sources as resolver_config
from lorafleet.protocol.adapter_formats import (
    adapter_classifier,
    adapter_files,
    safetensors_header,
    tensor_push,
    torch_archive,
    torch_index,
)
from lorafleet.protocol.transport import engine_socket
from lorafleet.resolvers import deadline, neighbor_fetch, neighbor_server, ranges, store
from lorafleet.sandbox import shunned
from lorafleet.workers.adapters import patterns, peft_helper, peft_names
from lorafleet.workers.adapters.kinds import vocabulary
from lorafleet.workers.structured import grammar_process, grammar_program, vocabularies

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
    Limit(
        "adapters whose files are fetched for their tokenizer and template at a time",
        languages.MAX_LANGUAGES_FETCHED,
        "",
        "further ones wait",
    ),
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
        "adapters of a tenant, and bytes of all their files",
        "none",
        "`adapters`, `adapter_bytes` of the tenant",
        "429 `rate_limit_exceeded`",
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
    Limit(
        "temporary folder that the pushes of one tenant take on a replica, each up to three times its bytes",
        "half of what others leave free; all that is free without a tenant",
        "",
        "429 `queue_full`, or 503 `store_error` if nothing else is under way",
    ),
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
