"""Bounds of /v1/files and /v1/batches. docs/limits.md shows them."""

from __future__ import annotations

from lorafleet.protocol.limits import Range

MAX_FILE_BYTES = 200 << 20  # OpenAI has the same limit.
MAX_FORM_BYTES = 64 << 10  # Largest part of an upload besides its file.
MAX_FIELDS = 8  # Fields of an upload besides its file.
MAX_UPLOAD_S = 600.0
MAX_FILENAME_CHARS = 255
MAX_LINES = 50_000  # OpenAI has the same limit.
MAX_ANSWER_BYTES = 8 << 20  # Largest answer to one line.
MAX_OUTPUT_BYTES = 2 << 30  # Bytes of all answers of one batch.
MAX_FILES_OF_ONE = 1000  # Files of one tenant.
MAX_BYTES_OF_ONE = 0.5  # Largest share of --batch-store-bytes that one tenant may use for its files.
MAX_BATCHES_OF_ONE = 1000  # Batches of one tenant. A new one replaces the oldest that has ended.
MAX_OPEN_OF_ONE = 50  # Batches of one tenant that have not ended.
MAX_RUNNING = 8  # Batches whose lines are sent at a time, in the whole cluster.
MAX_RUNNING_OF_ONE = 2  # Batches of one tenant whose lines are sent at a time.
MAX_ERRORS = 50  # Faults that a batch that failed lists.
MAX_METADATA = 16  # OpenAI has the same limit, and the same sizes of keys and values.
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_CHARS = 512
DEFAULT_LIVES_S = 30 * 86_400
BATCH_LIVES_S = 30 * 86_400  # Seconds for which a batch that has ended is shown.
BATCH_TURN_S = 15.0  # A replica that does not renew its lease on the batches for so long loses it.
WINDOW_S = 86_400  # The completion window of "24h".
MAX_FILES_LISTED = 10_000  # Files on one page, as at OpenAI.
BATCHES_LISTED = Range(1, 100)  # OpenAI has the same limit.
