"""Floor 2: the contract of attention: its dataflow, bases, config, and what of it plain weights can say."""
