"""Text, tokens and their order: corpora, tokenizers, packing. Every result depends on the arguments alone."""
