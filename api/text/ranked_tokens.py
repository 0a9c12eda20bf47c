"""Makes tokenizers of the `tokenizers` library from ranked tokens, the form of tiktoken's vocabularies.

The rank of a token is both its place in the order of merges and its id. The files that hold such vocabularies are
read by tekken_file.py and tiktoken_file.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from lorafleet.api.text.token_table import char_of_byte
from lorafleet.protocol.errors import ConfigError


def build_ranked(
    ranks: Mapping[bytes, int], pattern: str, special: Mapping[str, int], *, first_rank_id: int = 0
) -> Tokenizer:
    """Returns a byte-level BPE tokenizer.

    Args:
        ranks: Each token's rank by its bytes.
        pattern: Regular expression whose matches are tokenized one by one.
        special: Ids of special tokens by their text.
        first_rank_id: The id of rank 0.
    """
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ConfigError(f"the vocabulary has no token for the byte {missing[0]:#04x}; it must have all 256.")
    spelled = {raw: "".join(map(char_of_byte, raw)) for raw in ranks}
    ids = {spelled[raw]: rank + first_rank_id for raw, rank in ranks.items()}
    _check_ids([*ids.values(), *special.values()])
    for text in special:
        if text in ids:
            raise ConfigError(f"the special token {text!r} is also an ordinary token; their names must differ.")
    tokenizer = Tokenizer(models.BPE({**ids, **special}, _merges(ranks, spelled), ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    by_id = sorted(special, key=lambda text: special[text])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in by_id])
    return tokenizer


def _merges(ranks: Mapping[bytes, int], spelled: Mapping[bytes, str]) -> list[tuple[str, str]]:
    """Returns each way to divide a token into two tokens. A token with a lower rank is merged first, and of equal pairs
    the leftmost, so pairs with a long left part go first."""
    merges: list[tuple[str, str]] = []
    for raw in sorted(ranks, key=lambda raw: ranks[raw]):
        merges += [
            (spelled[raw[:cut]], spelled[raw[cut:]])
            for cut in range(len(raw) - 1, 0, -1)
            if raw[:cut] in ranks and raw[cut:] in ranks
        ]
    return merges


def _check_ids(ids: Sequence[int]) -> None:
    if len(set(ids)) != len(ids) or min(ids) < 0:
        raise ConfigError("the vocabulary gives two tokens one id, or an id below 0; each needs its own.")
