"""Lists the limits of requests: bodies, queues, files and batches."""

from __future__ import annotations

from limit_rows import BUSY, FAILED, INTERNAL, RATE, REFUSED, Limit, chars, default, flag, seconds, size
from lorafleet.api import languages
from lorafleet.api.access import body_budget, work_threads
from lorafleet.api.access import caller_admission as request_admission
from lorafleet.api.access.fair_threads import LONG_WORK
from lorafleet.api.answer import gathered_writes, generation, piecewise
from lorafleet.api.request import prompts
from lorafleet.api.routes import response_storing
from lorafleet.api.stored import background_run, response_store, stored_responses
from lorafleet.api.telemetry import recent, traffic_history
from lorafleet.api.text import templates, tokenizing
from lorafleet.cluster.batches import batch_bounds
from lorafleet.cluster.config import AppArgs
from lorafleet.cluster.directory.directory_timing import TIMING
from lorafleet.cluster.proxy import haproxy_answers, haproxy_config, haproxy_sessions
from lorafleet.cluster.proxy.waiting_room import WaitingRoom
from lorafleet.cluster.serve import residency_metrics, serve_environment
from lorafleet.offline.batch import batch_input
from lorafleet.offline.batch.answering import Pace
from lorafleet.protocol import limits
from lorafleet.protocol.kv_events_config import KVEventsConfig
from lorafleet.protocol.transport import engine_socket, output_stream, unread_outputs
from lorafleet.workers.kv_events import event_publisher
from lorafleet.workers.schedule import admission, fair_queue
from lorafleet.workers.structured import grammar_process

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
        "whole answers that are being generated, of all requests in flight on a replica",
        f"{size(body_budget.GROWING_BUDGETS * limits.MAX_BODIES_BYTES)}, half of it for one tenant",
        f"{flag('max_body_bytes')}: {body_budget.GROWING_BUDGETS} times the bodies",
        "one tenant's: 429 `queue_full`; of all: 503 `overloaded`; with Retry-After",
    ),
    Limit(
        "whole answers that their clients have not read, as part of these bodies",
        "half of them for one tenant, and one answer",
        f"{flag('max_body_bytes')}",
        BUSY,
    ),
    Limit(
        "answers without `stream` while they are generated, and what streams of `/v1/responses` and `/generate` keep, "
        "as part of these bodies",
        "half of them for one tenant",
        f"{flag('max_body_bytes')}",
        "the request ends: 429 `queue_full` or 503 `overloaded`, with Retry-After",
    ),
    Limit(
        "stored responses of a replica",
        f"{size(limits.RESPONSE_STORE_BYTES)}, {response_store.MAX_STORED_RESPONSES:,} responses, "
        f"{seconds(response_store.MAX_STORED_S)}",
        flag("response_store_bytes"),
        "the oldest response of the tenant that has most is dropped",
    ),
    Limit(
        "queries for stored responses that a replica sends to all others at a time",
        f"{stored_responses.ASKED.running}; {stored_responses.ASKED.waiting} of one tenant wait",
        "",
        BUSY,
    ),
    Limit(
        "responses that are being generated, with their events, as part of the stored ones",
        "half of them for one tenant",
        flag("response_store_bytes"),
        "the oldest events are dropped, and a client that asks for them gets a 400; beyond that the response fails "
        "with `queue_full`",
    ),
    Limit("events of a response that a replica sends at a time", size(background_run.PAGE_BYTES), "", "no error"),
    Limit("responses of one tenant in the background, on a replica", response_storing.MAX_BACKGROUND, "", BUSY),
    Limit("connections of one address", haproxy_config.CONNECTIONS_PER_CLIENT, "", "connection closed"),
    Limit("commas in a body, texts included", limits.MAX_BODY_COMMAS, "", "413 `body_too_large`"),
    Limit(
        "opening brackets and braces in a body, texts included", limits.MAX_BODY_BRACKETS, "", "413 `body_too_large`"
    ),
    Limit("colons in a body, texts included", limits.MAX_BODY_COLONS, "", "413 `body_too_large`"),
    Limit("content type of a body", "application/json", "", "415 `unsupported_media_type`"),
    Limit("content encoding of a body", "none", "", "415 `unsupported_media_type`"),
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
    Limit(
        "logprobs of a request's prompts, and of its answers without `stream`, those of the best tokens included",
        limits.MAX_ANSWER_LOGPROBS,
        "",
        REFUSED,
    ),
    Limit("texts of all pairs of `/score` and `/rerank` with a head", chars(limits.MAX_PAIR_CHARS), "", REFUSED),
    Limit("numbers that a classification head computes", limits.MAX_HEAD_VALUES, "", REFUSED),
    Limit("tokens of the words of `bad_words`, in all spellings", limits.MAX_BAD_WORDS_TOKENS, "", REFUSED),
    Limit(
        "texts of the answer's format, `stop` and `bad_words`, for each prompt x n",
        chars(limits.MAX_SENT_CHARS),
        "",
        REFUSED,
    ),
    Limit(
        "token ids of `allowed_token_ids`, `bad_words`, `logit_bias` and `stop_token_ids`, for each prompt x n",
        limits.MAX_LISTED_IDS,
        "",
        REFUSED,
    ),
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
    Limit("regular expressions of all custom tools together", chars(limits.MAX_SOURCE_BYTES), "", REFUSED),
    Limit(
        "grammar that a structural tag or strict functions become, each use of a text counted",
        chars(limits.MAX_SOURCE_BYTES),
        "",
        REFUSED,
    ),
    Limit(
        "trigger, begin, end, separator or constant of a structural tag", chars(limits.MAX_TAG_TEXT_CHARS), "", REFUSED
    ),
    Limit(
        "values in a schema, `chat_template_kwargs` or a field without effect",
        f"{limits.MAX_JSON_VALUES:,}, {limits.MAX_JSON_DEPTH} levels",
        "",
        REFUSED,
    ),
    Limit("models that the prompts of `/generate` name", limits.MAX_NAMED_MODELS, "", REFUSED),
    Limit("adapters in a mix", limits.MAX_MIXED, "", REFUSED),
]
WAITING = WaitingRoom()
STARTING = "429 `replica_starting`"
QUEUES = [
    Limit("requests that wait at HAProxy while there is no replica", WAITING.max_requests, "", STARTING),
    Limit("those of one API key", WAITING.max_per_key, "", STARTING),
    Limit("those of one address", WAITING.max_per_address, "", STARTING),
    Limit(
        "bytes that HAProxy holds of one of them",
        size(2 * serve_environment.ROUTED_BODY_BYTES),
        "",
        "the rest stays with the client until there is a replica",
    ),
    Limit("time that a request waits for a replica to start", seconds(WAITING.wait_s), "", STARTING),
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
    *(
        Limit(
            f"{kind.name}: jobs at a time; jobs of one tenant that wait",
            f"{kind.limits.running}; {kind.limits.waiting}",
            "",
            f"further ones wait; {BUSY}",
        )
        for kind in (
            work_threads.CHECKS,
            work_threads.FILES,
            work_threads.PUSHED_BYTES,
            work_threads.CATALOGUE_LOG,
            work_threads.CATALOGUE_FILES,
        )
    ),
    Limit("threads for the server's own duties", work_threads.DUTY_THREADS, "", "no request may use them"),
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
        "generated outputs of one stream that wait for its client",
        f"{size(unread_outputs.MAX_UNREAD_OF_ONE)} in memory: about 100,000 tokens, or 2,500 with 20 logprobs each",
        "",
        "the sequence is aborted, and the stream ends with `client_too_slow`",
    ),
    Limit(
        "generated outputs of all streams of a replica that wait for their clients",
        f"{size(unread_outputs.MAX_UNREAD)}, half of it for one tenant",
        "",
        "the same, for a stream of a tenant that has more than an equal share",
    ),
    Limit(
        "outputs that become one event at most; bytes of events that one turn of the event loop gathers for a stream",
        f"{size(output_stream.PIECE_BYTES)}; {size(gathered_writes.MAX_GATHERED_BYTES)}",
        "",
        "further ones wait",
    ),
    Limit("deltas of one request's samples that wait for its stream", generation.MAX_MERGED, "", "further ones wait"),
    Limit(
        "bytes of an answer, file or adapter that wait in a connection for a slow client",
        size(piecewise.MAX_SENT_BYTES),
        "",
        "further ones wait",
    ),
    Limit(
        "steps that wait between the engine's process and the front, on each side",
        engine_socket.MAX_STEPS_WAITING,
        "",
        "the engine waits for the front",
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
    Limit("commas, opening brackets and colons of a line", "those of a body", "", FAILED),
    Limit(
        "bytes of the lines of a batch that are sent at a time",
        f"{size(Pace(1).most_bytes)}; a longer line is sent alone",
        "",
        "further ones wait",
    ),
    Limit("line", f"{batch_input.MAX_LINE_BYTES:,} bytes", "", FAILED),
    Limit("faults that a batch lists", batch_bounds.MAX_ERRORS, "", "further ones are not shown"),
    Limit("answer of a line", size(batch_bounds.MAX_ANSWER_BYTES), "", "the line's error is `answer_too_large`"),
    Limit(
        "answers of a batch",
        f"{size(batch_bounds.MAX_OUTPUT_BYTES)}, or what is left for the tenant's files",
        "",
        FAILED,
    ),
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
