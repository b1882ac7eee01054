"""How much of a text its tokens lose. Bits per byte divides by all bytes, so the tokens must represent all of them.

    y = decode(encode(x)), without special and unknown tokens, and without cleaning up spaces
    lost(x) = 0 where y is x, or differs in one space at its very start, which some tokenizers add to every text
            = max(bytes of characters that x has more of than y, bytes of characters that y has more of than x, 1) else

The second is a lower bound of what differs: a character that comes back as another counts once, and the order of
characters is not looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast


def lost_bytes(text: str, ids: Sequence[int], tokenizer: PreTrainedTokenizerFast) -> int:
    """A lower bound of the bytes of `text` that cannot be recovered from its `ids`; 0 if all can."""
    unknown = tokenizer.unk_token_id
    kept = [index for index in ids if index != unknown]
    back = tokenizer.backend_tokenizer.decode(kept, skip_special_tokens=True)
    if back == text or f" {back}" == text or back == f" {text}":
        return 0
    there, here = Counter(text), Counter(back)
    return min(len(text.encode()), max(_bytes(there - here), _bytes(here - there), 1))


def _bytes(characters: Counter[str]) -> int:
    return sum(len(character.encode()) * count for character, count in characters.items())
