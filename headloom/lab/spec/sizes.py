"""Model sizes by name: `tiny` and `small` for a desk, and the shapes the papers trained.

The papers' feed-forward is ungated with width 4 D; ours is Hugging Face Llama's gated one, which has three matrices
instead of two, so its width is 8 D / 3 (rounded to a multiple of 8) for the same number of parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

from headloom.core.errors import unknown


@dataclass(frozen=True, kw_only=True)
class Size:
    """The backbone's shape and the training settings that go with it.

    hidden_size D, num_layers, num_heads H, head_dim K, intermediate_size F; `tokens` is the context in tokens;
    `vocab_size` serves costs alone (a comparison takes the tokenizer's); `learning_rate` is the paper's, or ours;
    `validation_bytes` bounds the text a run is measured on; `threads` are a run's (None: all there are), for models so
    small that runs side by side get more done than one on all cores.
    `source` says whose shape it is.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    tokens: int
    learning_rate: float
    source: str
    vocab_size: int = 50_304
    tie_embeddings: bool = True
    rope_theta: float = 10_000.0
    batch_size: int = 8
    steps: int = 1000
    threads: int | None = None
    validation_bytes: int = 2**20

    @property
    def head_dim(self) -> int:
        """K: the width divided by the heads."""
        return self.hidden_size // self.num_heads

    @property
    def intermediate_size(self) -> int:
        """F: the width of the gated feed-forward."""
        return gated_width(self.hidden_size)

    @property
    def nominal_parameters(self) -> int:
        """The papers' count: 12 D^2 a layer and the embeddings (once if tied), without norms."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return 12 * self.hidden_size**2 * self.num_layers + embeddings


def gated_width(hidden_size: int) -> int:
    """8 D / 3 to the nearest multiple of 8: the gated width with as many parameters as an ungated 4 D.

    >>> gated_width(768)
    2048
    """
    return max(8, 8 * round(hidden_size / 3))


def feed_forward(inner: int, hidden_size: int, other: int) -> int:
    """The feed-forward's width in a model of width `other` that is `inner` in one of `hidden_size`: the usual gated one
    where that is the usual one, else in proportion.

    >>> feed_forward(2048, 768, 1024), feed_forward(3072, 768, 1024)
    (2728, 4096)
    """
    return gated_width(other) if inner == gated_width(hidden_size) else max(1, round(inner * other / hidden_size))


def _gpt3(name: str, layers: int, width: int, heads: int, learning_rate: float, tied: bool = True) -> Size:
    source = "GPT-3 shape (arXiv:2005.14165), followed by SAS (arXiv:2507.07694)"
    return Size(
        name=name,
        num_layers=layers,
        hidden_size=width,
        num_heads=heads,
        tokens=2048,
        learning_rate=learning_rate,
        source=source,
        tie_embeddings=tied,
    )


_ALL = (
    Size(
        name="tiny",
        num_layers=2,
        hidden_size=128,
        num_heads=8,
        tokens=128,
        learning_rate=1e-3,  # what the ready study equal_parameters chose for mha, on text that is not reported
        source="ours: a comparison in minutes on two cores",
        vocab_size=258,
        batch_size=8,
        steps=300,
        threads=1,
        validation_bytes=2**16,
    ),
    Size(
        name="small",
        num_layers=6,
        hidden_size=256,
        num_heads=8,
        tokens=512,
        learning_rate=1e-3,
        source="ours: an hour on a few cores",
        vocab_size=258,
        batch_size=16,
        steps=1000,
    ),
    _gpt3("125M", 12, 768, 12, 6e-4),
    _gpt3("350M", 24, 1024, 16, 3e-4),
    _gpt3("1.3B", 24, 2048, 32, 2e-4),
    Size(
        name="2.4B",
        num_layers=26,
        hidden_size=2560,
        num_heads=20,
        tokens=8192,
        learning_rate=1.6e-4,
        source="the interleaved-heads paper (arXiv:2602.21371)",
        vocab_size=128_256,
        rope_theta=500_000.0,
    ),
    _gpt3("2.7B", 32, 2560, 32, 1.6e-4),
    _gpt3("6.7B", 32, 4096, 32, 1.2e-4),
    _gpt3("10.6B", 32, 5120, 40, 1.2e-4, tied=False),
)
SIZES: dict[str, Size] = {size.name: size for size in _ALL}


def get_size(name: str) -> Size:
    """The size of that name; an unknown one is refused with the near names."""
    if name not in SIZES:
        raise unknown("size", name, list(SIZES))
    return SIZES[name]
