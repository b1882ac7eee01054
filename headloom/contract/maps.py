"""What an attention does to tokens, as `Attention.maps` gives it."""

from __future__ import annotations

import dataclasses

from torch import Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Maps:
    """What an attention does to tokens.

    patterns: every attention pattern (B, heads, T, S), of the heads that are scored: the base's, or those that a
        mechanism makes of them. Where a token has P rows in the scores (`Attention.rows_per_token`) it is
        (B, heads, T P, S P). Rows sum to 1 (0: sees nothing), or to `Attention.row_sums()` where weights are mixed.
    effective: the per-token map (B, H, G, T, S) with out_h = sum_g effective[h, g] v_g over the base's values; where
        values are made of the base's in another than a linear way (B, H, T, S), the mean over what a head is made of;
        None where the merge is not linear.
    """

    patterns: Tensor
    effective: Tensor | None

    def __repr__(self) -> str:
        effective = None if self.effective is None else tuple(self.effective.shape)
        return f"Maps(patterns {tuple(self.patterns.shape)}, effective {effective})"
